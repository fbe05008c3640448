"""The CUTLASS 2.x main loops that a config can name, and what they take of a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass

from plantune.base.canonical import Attrs
from plantune.space.arch import Arch

ELEMENTS = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float"}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
WARPS = (4, 8)
# The least that cp.async moves at once.
CP_ASYNC_BYTES = 4
# Rows of a tile in shared memory are 64 or 128 bytes for matrix instructions. A thread has no more
# than one access of a row. Tiles of single values are transposed into padded rows of 8.
TILE_K = {"mma": (32, 64), "tf32": (16, 32), "simt": (8,)}
# Above these, builds for sm70 to sm90 had spills: operands of products need the rest of 255.
THREAD_REGISTERS = {"mma": 176, "tf32": 176, "simt": 140}

# What keeps the rows of an epilogue apart, on most archs.
EPILOGUE_PADDING = 8
# An epilogue of narrow accesses takes more shared memory, but no more than this many times as much.
NARROW_EPILOGUE = 1.5


@dataclass(frozen=True)
class MainLoop:
    """A threadblock tile, divided among warps, and the number of its copies in flight.

    `math` says how products are made: by the matrix instructions of a 16-bit type (`mma`), by
    those that round float32 to tf32 (`tf32`), or one by one (`simt`). If `access` is given, so many
    channels are moved at once, where they make no whole vectors.
    """

    dtype: str
    math: str
    tile: tuple[int, int, int]
    warp: tuple[int, int]
    stages: int
    access: int = 0

    @staticmethod
    def of(config: Attrs, dtype: str, access: int = 0) -> MainLoop:
        tile = (config["tile_m"], config["tile_n"], config["tile_k"])
        warp = (config["warp_m"], config["warp_n"])
        return MainLoop(dtype, config["math"], tile, warp, config["stages"], access)

    @property
    def warps(self) -> int:
        return (self.tile[0] // self.warp[0]) * (self.tile[1] // self.warp[1])

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def sums(self) -> int:
        """The sums that a thread holds."""
        return self.tile[0] * self.tile[1] // self.threads

    @property
    def vector(self) -> int:
        """Channels of one access to memory: 16 bytes for matrix instructions, else one value."""
        return 1 if self.math == "simt" else 16 // BYTES[self.dtype]

    def why_not(self, arch: Arch) -> str | None:
        """Why CUTLASS has no such main loop on an arch, or None if it has."""
        return (
            self._why_not_math(arch)
            or self._why_not_warps()
            or self._why_not_stages(arch)
            or self._why_not_registers()
            or self._why_not_shared(arch)
        )

    def _why_not_math(self, arch: Arch) -> str | None:
        if (self.math == "mma") != (self.dtype != "float32"):
            return f"{self.math} does not multiply {self.dtype}"
        wanted = {"bfloat16": "bf16", "float32": "tf32"}.get(self.dtype, "")
        if self.math != "simt" and wanted and wanted not in arch.gpu.features:
            return f"{arch.name} has no matrix instructions for {wanted}"
        if self.tile[2] not in TILE_K[self.math]:
            known = " or ".join(map(str, TILE_K[self.math]))
            return f"a tile_k of {self.tile[2]} does not fit {self.math}; it takes {known}"
        if "ldmatrix" not in arch.gpu.features and self.tile[2] > 32:
            return f"{arch.name} reads rows of 64 bytes, so tile_k is at most 32"
        return None

    def _why_not_warps(self) -> str | None:
        if any(tile % warp for tile, warp in zip(self.tile, self.warp, strict=False)):
            return "the tile is not a multiple of the warps' tiles"
        if self.warps not in WARPS:
            return f"{self.warps} warps; a block has 4 or 8, one or two a scheduler"
        return None

    def _why_not_stages(self, arch: Arch) -> str | None:
        if self.stages < 2:
            return "a pipeline has at least two stages"
        if self.stages > 2 and "cp_async" not in arch.gpu.features:
            return f"{arch.name} has no cp.async, so a pipeline through registers has two stages"
        if self.stages > 2 and 0 < self.access * BYTES[self.dtype] < CP_ASYNC_BYTES:
            return "cp.async moves no single 16-bit channels, so a pipeline has two stages"
        if self.stages == 2 and self.math == "tf32":
            return "CUTLASS rounds to tf32 only after cp.async, which two stages do not use"
        if self.stages > 2 and self.math == "simt":
            # Measured on an H200, 2026-11-20.
            return "single values by cp.async took 1.6 times as long as by two stages"
        return None

    def _why_not_registers(self) -> str | None:
        m, n, k = self.tile
        sums = self.sums
        loads = m * k // ((self.access or self.vector) * self.threads)
        # A pointer and two masks for each row of the image; two stages also keep loaded tiles.
        others = 4 * loads
        if self.stages == 2:
            others += (m + n) * k * BYTES[self.dtype] // (4 * self.threads)
        if sums + others > THREAD_REGISTERS[self.math]:
            return f"{sums} sums and {others} more values that a thread keeps would be spilled"
        return None

    def _why_not_shared(self, arch: Arch) -> str | None:
        epilogue = self._epilogue_bytes(arch) * NARROW_EPILOGUE
        if 0 < self.access < self.vector and epilogue > self.main_loop_bytes:
            return "what leaves by narrow words needs more shared memory than the main loop"
        wanted, most = self.shared_bytes(arch), arch.gpu.shared_memory_per_block_bytes
        if wanted > most:
            return f"it needs {wanted} bytes of shared memory, a block has {most}"
        return None

    def shared_bytes(self, arch: Arch) -> int:
        """Shared memory of one block; the main loop and the epilogue use the same."""
        return max(self.main_loop_bytes, self._epilogue_bytes(arch))

    @property
    def main_loop_bytes(self) -> int:
        """The bytes of both operands' tiles, for all stages."""
        m, n, k = self.tile
        padding = 4 if self.math == "simt" else 0
        return (m + n + 2 * padding) * k * self.stages * BYTES[self.dtype]

    @property
    def most_shared_bytes(self) -> int:
        """As much shared memory as one block takes on any arch."""
        return max(self.main_loop_bytes, self._epilogue_padded(EPILOGUE_PADDING))

    def _epilogue_bytes(self, arch: Arch) -> int:
        padding = EPILOGUE_PADDING if "ldmatrix" in arch.gpu.features else 2
        return self._epilogue_padded(padding)

    def _epilogue_padded(self, padding: int) -> int:
        """A few rows of float32 from each row of warps."""
        if self.math == "simt":
            return 0  # always less than the main loop's
        rows = 8 if self.dtype == "bfloat16" else 16
        return self.tile[0] // self.warp[0] * rows * (self.tile[1] + padding) * 4

    def arguments(self, arch: Arch) -> str:
        """The template arguments of `plantune::ImplicitGemmConv`, less the algorithm."""
        (m, n, k), (warp_m, warp_n) = self.tile, self.warp
        kind, tag, instruction = self._instruction(arch)
        return (
            f"{ELEMENTS[self.dtype]}, arch::{kind}, arch::{tag}, gemm::GemmShape<{m}, {n}, {k}>,\n"
            f"    gemm::GemmShape<{warp_m}, {warp_n}, {k}>, gemm::GemmShape<{instruction}>, "
            f"{self.stages}"
        )

    def _instruction(self, arch: Arch) -> tuple[str, str, str]:
        tag = next(t for t in ("Sm80", "Sm75", "Sm70") if _serves(t, arch.gpu.compute_capability))
        if self.math == "simt":
            return "OpClassSimt", tag, "1, 1, 1"
        shapes = {"Sm70": "8, 8, 4", "Sm75": "16, 8, 8", "Sm80": "16, 8, 16"}
        return "OpClassTensorOp", tag, "16, 8, 8" if self.math == "tf32" else shapes[tag]


def _serves(tag: str, capability: tuple[int, int]) -> bool:
    return divmod(int(tag[2:]), 10) <= capability
