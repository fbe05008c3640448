"""The archs that plantune knows, and the hardware facts in each one's search-space file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from plantune.base.nearest import hint
from plantune.base.paths import data_folder
from plantune.space import rules

ARCH_NAMES = ("cpu", "sm70", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
FEATURES = ("bf16", "clusters", "cp_async", "fp8", "ldmatrix", "tcgen05", "tf32", "tma", "wgmma")

# The table of costs that holds for every family.
ANY = "any"

Version = tuple[int, int]


class MmaShape(NamedTuple):
    """The shape of one warp-wide matrix instruction."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"


_VERSION = rules.Rule(
    "a pair [major, minor] of whole numbers",
    lambda value: isinstance(value, list) and [*map(type, value)] == [int, int] and min(value) >= 0,
)


@dataclass(frozen=True)
class CudaFacts:
    """What holds for every chip of one CUDA arch: limits, instructions, and who can compile it.

    The limits of one block are those a kernel may opt in to. `nvrtc_min` is never below 12.0, the
    oldest NVRTC that plantune takes; `nvrtc_below` is the first that has dropped the arch, or None.
    """

    compute_capability: Annotated[Version, _VERSION]
    nvrtc_arch: Annotated[str, rules.pattern(r"sm_\d{2,3}[af]?", "sm_90a")]
    nvrtc_min: Annotated[Version, _VERSION]
    warp_size: Annotated[int, rules.one_of(32)]
    threads_per_block_max: Annotated[int, rules.whole_number(32, 4096, 32)]
    threads_per_sm: Annotated[int, rules.whole_number(32, 4096, 32)]
    blocks_per_sm: Annotated[int, rules.whole_number(1, 64)]
    registers_per_sm: Annotated[int, rules.whole_number(1024, 1 << 20, 256)]
    registers_per_thread_max: Annotated[int, rules.whole_number(32, 1024)]
    shared_memory_per_sm_bytes: Annotated[int, rules.whole_number(1024, 1 << 20, 1024)]
    shared_memory_per_block_bytes: Annotated[int, rules.whole_number(1024, 1 << 20, 1024)]
    shared_memory_reserved_per_block_bytes: Annotated[int, rules.whole_number(0, 16384, 128)]
    mma_shapes_fp16: Annotated[tuple[MmaShape, ...], rules.pattern(r"m\d+n\d+k\d+", "m16n8k16")]
    features: Annotated[tuple[str, ...], rules.one_of(*FEATURES)]
    nvrtc_below: Annotated[Version | None, _VERSION] = None

    def resident(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Blocks of so many threads, registers of each and bytes that a multiprocessor has room
        for; at least one.
        """
        room = (
            self.threads_per_sm // threads,
            self.registers_per_sm // (threads * registers),
            self.shared_memory_per_sm_bytes
            // (shared_bytes + self.shared_memory_reserved_per_block_bytes),
        )
        return max(min(room), 1)

    def why_not_nvrtc(self, version: Version) -> str | None:
        """Why an NVRTC of this version cannot compile for the arch, or None if it can."""
        got = "got {}.{}".format(*version)
        if version < self.nvrtc_min:
            low = "{}.{}".format(*self.nvrtc_min)
            return f"{self.nvrtc_arch} needs NVRTC {low} or newer, {got}"
        if self.nvrtc_below is not None and version >= self.nvrtc_below:
            below = "{}.{}".format(*self.nvrtc_below)
            return f"{self.nvrtc_arch} needs an NVRTC older than {below}, {got}"
        return None


@dataclass(frozen=True)
class Chip:
    """The chip that guesses for an arch are made for, as its datasheet describes it.

    Products of 16-bit values are those of tensor cores, dense, with sums in float32; products of
    float32 are those outside of tensor cores.
    """

    name: Annotated[str, rules.pattern(r"[A-Za-z0-9][A-Za-z0-9 ()_-]{0,39}", "A100")]
    multiprocessors: Annotated[int, rules.whole_number(1, 1024)]
    fp16_tflops: Annotated[float, rules.quantity(1, 1e5)]
    fp32_tflops: Annotated[float, rules.quantity(1, 1e4)]
    memory_gb_per_s: Annotated[float, rules.quantity(10, 1e5)]


@dataclass(frozen=True)
class Arch:
    """One kind of processor that a plan is made for; `cuda` and `chip` are None on the CPU."""

    name: str
    cuda: CudaFacts | None = None
    chip: Chip | None = None
    # Of each kernel family what guesses of its times are made of, as measured; see `cost`.
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False)

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.cuda is None else "cuda"

    @property
    def gpu(self) -> CudaFacts:
        """`cuda`, of an arch that is known to have it."""
        assert self.cuda is not None
        return self.cuda

    def cost(self, family: str) -> Mapping[str, float]:
        """The costs of a family; what it has none of its own for is that of any."""
        return {**self.costs.get(ANY, {}), **self.costs.get(family, {})}


def load_arch(name: str) -> Arch:
    """The arch called `name`. Raises InvalidSearchSpace if it is unknown or its file is broken."""
    return parse_arch(load_space_file(name))


def load_space_file(arch_name: str) -> rules.SpaceFile:
    """Read the search-space file of one arch."""
    if arch_name not in ARCH_NAMES:
        known = rules.one_of(*ARCH_NAMES)
        rule = replace(known, text=f"{known.text}{hint(arch_name, ARCH_NAMES)}")
        rules.require(f"arch {arch_name!r}", arch_name, rule)
    return _file_at(data_folder("search_spaces") / f"{arch_name}.toml")


@cache  # as long as the process lives these files are what they were
def _file_at(path: Path) -> rules.SpaceFile:
    return rules.parse_space_file(rules.read_space_file(path), path)


@lru_cache(maxsize=32)
def parse_arch(file: rules.SpaceFile) -> Arch:
    """The arch that a search-space file describes."""
    place, name = f"{file.path}: [facts]", file.path.stem
    rules.require(f"{file.path}: file name", name, rules.one_of(*ARCH_NAMES))
    if name == "cpu":
        rules.require_keys(place, file.facts, required=("kind",))
        rules.require(f"{place} kind", file.facts["kind"], rules.one_of("cpu"))
        return Arch(name, costs=_costs(file))
    known = _rules(CudaFacts)
    required = [key for key in known if key != "nvrtc_below"]
    rules.require_keys(place, file.facts, ("kind", *required), optional=("nvrtc_below",))
    rules.require(f"{place} kind", file.facts["kind"], rules.one_of("cuda"))
    facts = {key: value for key, value in file.facts.items() if key != "kind"}
    read = {key: _read(f"{place} {key}", key, facts[key], known[key]) for key in facts}
    cuda = CudaFacts(**read)
    _require_agreement(place, name, cuda)
    return Arch(name, cuda, _chip(f"{file.path}: [chip]", file.chip), _costs(file))


@cache
def _rules(class_: type[CudaFacts | Chip]) -> Mapping[str, rules.Rule]:
    """What the value of each field must be."""
    hints = get_type_hints(class_, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def _costs(file: rules.SpaceFile) -> Mapping[str, Mapping[str, float]]:
    for family, table in file.costs.items():
        place = f"{file.path}: [costs.{family}]"
        rules.require(place, table, rules.TABLE)
        for word, value in table.items():
            rules.require(f"{place} {word}", value, rules.quantity(1e-9, 1e12))
    return file.costs


def _chip(place: str, table: Mapping[str, Any] | None) -> Chip | None:
    if table is None:
        return None
    rules.require_keys(place, table, tuple(_rules(Chip)))
    for key, rule in _rules(Chip).items():
        rules.require(f"{place} {key}", table[key], rule)
    return Chip(**table)


def _read(place: str, key: str, value: Any, rule: rules.Rule) -> Any:
    if key == "mma_shapes_fp16":
        return tuple(map(_mma_shape, rules.require_list(place, value, rule)))
    if key == "features":  # Volta has none of them
        return tuple(sorted(rules.require_list(place, value, rule, may_be_empty=True)))
    rules.require(place, value, rule)
    return tuple(value) if isinstance(value, list) else value


def _mma_shape(word: str) -> MmaShape:
    m, n, k = (int(digits) for digits in re.findall(r"\d+", word))
    return MmaShape(m, n, k)


def _require_agreement(place: str, name: str, cuda: CudaFacts) -> None:
    """Refuse facts that are each possible but cannot hold together."""
    number = name.removeprefix("sm")
    block_bytes = cuda.shared_memory_per_block_bytes + cuda.shared_memory_reserved_per_block_bytes
    agreements = (
        ("compute_capability", cuda.compute_capability == divmod(int(number), 10),
         f"the numbers of the arch, {name}"),
        # The suffix "a" adds instructions of exactly this chip, "f" those of its family.
        ("nvrtc_arch", cuda.nvrtc_arch.rstrip("af") == f"sm_{number}", f"sm_{number}[a|f]"),
        ("nvrtc_below", cuda.nvrtc_below is None or cuda.nvrtc_min < cuda.nvrtc_below,
         "a version after nvrtc_min"),
        ("shared_memory_per_block_bytes", block_bytes <= cuda.shared_memory_per_sm_bytes,
         "at most shared_memory_per_sm_bytes less the reserved bytes"),
        ("threads_per_block_max", cuda.threads_per_block_max <= cuda.threads_per_sm,
         "at most threads_per_sm"),
    )  # fmt: skip
    for key, agrees, remedy in agreements:
        if not agrees:
            raise rules.invalid(f"{place} {key}", getattr(cuda, key), remedy)
