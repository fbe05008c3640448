"""What follows a kernel's sums, as the types of `csrc/cuda/epilogue.h`.

A chain names what is done to the value, first to last: "residual" and "offset" are added to it,
"mask" is the gradient of a ReLU, anything else is a function of the table. "apart" is an offset by
`add_apart`, and "mask.apart" the gradient of the ReLU before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from plantune.graph.ops.functions import FUNCTIONS

Chain = tuple[str, ...]
ADDED = {
    "residual": "plantune::PlusResidual<{}>",
    "offset": "plantune::PlusOffset<{}>",
    "apart.float16": "plantune::PlusApart<plantune::OfHalf, {}>",
    "apart.bfloat16": "plantune::PlusApart<plantune::OfBfloat16, {}>",
    "mask": "plantune::Masked<{}>",
    "mask.apart": "plantune::MaskedApart<{}>",
}
FUNCTOR = """struct {name} {{
  static __device__ __forceinline__ float of(float x) {{ return {cxx}; }}
}};
"""


def functions_in(chain: Chain) -> list[str]:
    return [part for part in chain if part not in ADDED]


def functors(chain: Iterable[str]) -> str:
    """Source that defines the functions of one chain or more, to put after the include."""
    names = sorted({*chain} - {*ADDED})
    return "".join(
        FUNCTOR.format(name=functor(name), cxx=FUNCTIONS[name].cxx.format("x")) for name in names
    )


def rendered(chain: Chain) -> dict[str, str]:
    """What sources of one chain say: its `functors` and the `expression`."""
    return {"functors": functors(chain), "expression": expression(chain)}


def defined_function(chain: Chain) -> str:
    """What a unit of csrc/cpu is compiled with for the one function of a chain; it has ReLU."""
    others = (FUNCTIONS[name].cxx for name in functions_in(chain) if name != "relu")
    return "".join(f"#define PLANTUNE_FUNCTION(x) ({cxx.format('x')})\n" for cxx in others)


def expression(chain: Chain) -> str:
    """The type of a chain."""
    return reduce(_around, chain, "plantune::Value")


def _around(inner: str, part: str) -> str:
    applied = f"plantune::Applied<{functor(part)}, {{}}>"
    return ADDED.get(part, applied).format(inner)


def functor(name: str) -> str:
    """What a source calls a function."""
    return name.title().replace("_", "")
