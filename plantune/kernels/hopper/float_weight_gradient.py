"""The tile of a float32 weight's gradient on Hopper, whose factors are planes of bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

from plantune.kernels.chips import measured_facts
from plantune.kernels.hopper import tiles
from plantune.kernels.hopper.products import plane_product
from plantune.kernels.hopper.weight_gradient import WgradDesign

INCLUDE = '#include "cuda/hopper_float_wgrad.h"\n#include "cuda/wgrad_sum.h"\n'
# From so many planes on, sums leave the tensor cores after 16 pixels.
LEAVES_FROM = 3
# Taps of a warpgroup whose sums stay in the tensor cores, and of one whose sums leave them.
TAPS, LEAVING_TAPS = 3, 5
# Registers of a thread by how many warpgroups multiply; those beside sums and factors.
REGISTERS, OTHER_REGISTERS = {1: 232, 2: 224, 3: 152}, 20


@dataclass(frozen=True)
class FloatWgradDesign(WgradDesign):
    """A design whose blocks split floats: x in shared memory, dy in registers."""

    planes: int

    @property
    def products(self) -> int:  # type: ignore[override]
        return self.planes * (self.planes + 1) // 2

    @property
    def stage_bytes(self) -> int:
        """Twice what it is for 16 bits."""
        return 2 * super().stage_bytes

    @property
    def planes_bytes(self) -> int:
        """Those of x."""
        parts = self.tile_n // tiles.CHUNK
        return self.planes * parts * self.cut.phases * self.cut.phase_bytes

    @property
    def plane_stages(self) -> int:
        """Two where they fit."""
        return 2 if self._bytes(2) <= measured_facts().shared_memory_per_block_bytes else 1

    def _bytes(self, plane_stages: int) -> int:
        ring = self.stages * self.stage_bytes + plane_stages * self.planes_bytes
        return ring + 16 * (self.stages + plane_stages) + tiles.SWIZZLE_BYTES

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.plane_stages)

    @property
    def leaves(self) -> bool:
        return self.planes >= LEAVES_FROM

    @property
    def tap_groups(self) -> int:
        """Warpgroups that share the taps."""
        return -(-self.taps // (LEAVING_TAPS if self.leaves else TAPS))

    @property
    def groups(self) -> int:
        return self.tap_groups * self.tile_m // tiles.CHUNK

    @property
    def sums_of_thread(self) -> int:
        """With those that are on their way from the tensor cores, and factors."""
        taps = -(-self.taps // self.tap_groups) + (1 if self.leaves else 0)
        return taps * self.tile_n // 2 + 4 * self.planes

    @property
    def registers_for_sums(self) -> int:
        return REGISTERS.get(self.groups, 0) - OTHER_REGISTERS

    def source(self, factor: str, result: str, layout: str) -> str:
        more = {"kPlanes": self.planes, "kPlaneStages": self.plane_stages}
        more["kTapGroups"] = self.tap_groups
        gradient = self.gradient("__nv_bfloat16", "float", layout, **more)
        product = plane_product("bfloat16", self.tile_n, transposed=True)
        return INCLUDE + product + gradient + self.kernels("HopperFloatWgrad")
