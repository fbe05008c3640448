"""Attention of short sequences in one kernel, from Ampere on: `csrc/cuda/attention.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from plantune.graph import Step
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, refuse
from plantune.kernels.cuda.warp_mma import DTYPES
from plantune.kernels.patterns.attention import Addend, AttentionParts, Operand, attention_parts
from plantune.kernels.weights.constants import rows_of

# A row's scores and its result stay in a thread's registers, a head's keys and values in shared
# memory that needs no leave.
KEYS_MAX, COLUMNS_MAX, ADDENDS_MAX = 128, 64, 3
ROWS = 16  # of a warp
SOURCE = (
    """#include "cuda/attention.h"
struct Call {{
  using T = {element};
  static constexpr int kHeads = {heads}, kRows = {rows}, kKeys = {keys};
  static constexpr int kWidth = {width}, kValues = {values}, kThreads = {threads};
  static constexpr int kAddends = {addends};
  static constexpr float kScale = {scale!r}f;
  static constexpr long long kQ[] = {q}, kK[] = {k}, kV[] = {v}, kY[] = {y};
  static constexpr long long kRowStrides[] = {row_strides}, kKeyStrides[] = {key_strides};

  /// Where an addend has the matrix that belongs to number `i` of the scores.
  static __device__ __forceinline__ long long matrix(int addend, unsigned i) {{
    switch (addend) {{{matrices}
      default: return 0;
    }}
  }}
}};
using Kernel = plantune::Attention<Call>;"""
    + vector_kernel.ENTRIES
)


class Attention(CudaFamily[AttentionParts]):
    """Config: the `threads` of a block, which has one head."""

    name: ClassVar = "attention"
    image_layout = "nchw"  # strides are those of rows

    def read(self, step: Step) -> AttentionParts:
        parts = attention_parts(step)
        dtypes = sorted({type_.dtype for _, type_ in (*step.inputs, *step.outputs)})
        keys, width, values = parts.sizes[3:]
        read = (parts.queries, parts.keys, parts.values)
        refuse(
            {
                f"tensor cores take {' or '.join(DTYPES)} here, not {', '.join(dtypes)}": len(
                    dtypes
                )
                > 1
                or dtypes[0] not in DTYPES,
                "there is nothing to compute": 0 in parts.sizes,
                f"{keys} keys are too many": keys > KEYS_MAX,
                f"{width} or {values} columns are too many": max(width, values) > COLUMNS_MAX,
                f"{width} and {values} columns are not whole steps": bool(width % 16 or values % 8),
                "columns are apart": any(each.strides[-1] != 1 for each in read),
                "rows are not whole words apart": any(map(_is_ragged, read)),
                f"{ADDENDS_MAX} addends at most": len(parts.addends) > ADDENDS_MAX,
            }
        )
        return parts

    def why_not_config(self, parts: AttentionParts, config: Attrs, arch: Arch) -> str | None:
        warps, tiles = int(config["threads"]) // 32, -(-parts.sizes[2] // ROWS)
        if warps > tiles:
            return f"{warps} warps are more than {tiles} tiles of rows"
        return None

    def estimate_us(self, parts: AttentionParts, config: Attrs, arch: Arch) -> float:
        cost = arch.cost(self.name)
        moved = parts.step.traffic_bytes / cost["bytes_per_us"]
        tiles = -(-parts.sizes[2] // ROWS)
        turns = -(-tiles // (int(config["threads"]) // 32))
        passes = cost["passes"] + cost["passes_of_addend"] * len(parts.addends)
        work = moved * (1 + cost["turn"] * (turns - 1)) * passes
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: AttentionParts, config: Attrs, arch: Arch) -> str:
        _, heads, rows, keys, width, values = parts.sizes
        rest = [addend.strides[-2:] for addend in parts.addends]
        return SOURCE.format(
            element=vector_kernel.ELEMENTS[parts.step.nodes[-1].types[0].dtype],
            threads=config["threads"],
            scale=parts.scale,
            addends=len(parts.addends),
            q=_listed(parts.queries.strides[:3]),
            k=_listed(parts.keys.strides[:3]),
            v=_listed(parts.values.strides[:3]),
            y=_listed(parts.made),
            row_strides=_listed([row for row, _ in rest] or [0]),
            key_strides=_listed([key for _, key in rest] or [0]),
            matrices="".join(map(_case, range(len(rest)), parts.addends)),
            **{"heads": heads, "rows": rows, "keys": keys, "width": width, "values": values},
        )

    def bind(self, parts: AttentionParts, config: Attrs, frame: Frame) -> Binding:
        constants, y = rows_of(parts.step, frame), parts.step.nodes[-1].name
        batches, heads, *_ = parts.sizes
        kernel = vector_kernel.VectorKernel(frame.built, batches * heads, int(config["threads"]))
        operands = (parts.queries, parts.keys, parts.values)

        def launch(stream: int) -> None:
            read = [constants.tensor(operand.name) for operand in operands]
            added = [constants.tensor(addend.name).data_ptr() for addend in parts.addends]
            addresses = [
                tensor.data_ptr() + operand.offset * tensor.itemsize
                for tensor, operand in zip(read, operands, strict=True)
            ]
            made = frame.values[y].data_ptr()
            kernel.launch(stream, vector_kernel.members(*addresses, made, *(added or [0])), read)

        return Binding(launch, constants=constants.all)


def _is_ragged(operand: Operand) -> bool:
    return any(distance % 8 for distance in (operand.offset, *operand.strides[:3]))


def _listed(numbers: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, numbers))}}}"


def _case(which: int, addend: Addend) -> str:
    """The matrix's place: its number is taken apart along the axes in which the addend has it."""
    terms, rest = [], "i"
    lead = list(zip(addend.sizes[:-2], addend.strides[:-2], strict=True))
    for size, stride in reversed(lead):
        if stride:
            terms.append(f"(long long)({rest} % {size}u) * {stride}")
        rest = f"{rest} / {size}u"
    return f"\n      case {which}: return {' + '.join(terms) or '0'};"


FAMILY = Attention()
