"""The configs that a search may try on one arch, as `search_spaces/<arch>.toml` lists them.

A family's configs are the cartesian product of its axes. Whether a config can run a given step is
the kernel family's to say; here a file is only kept from holding words and values without meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from plantune.base.canonical import Attrs, Scalar, digest, words
from plantune.space import rules
from plantune.space.arch import Arch, load_space_file, parse_arch

Axes = Mapping[str, tuple[Scalar, ...]]

# The one set of axis words: what a config may say, and which values have a meaning.
AXES: Mapping[str, rules.Rule] = {
    "layout": rules.one_of("nchw", "nhwc"),
    "prepack": rules.one_of(False, True),
    # Matrix instructions read rows of 8 fp16 values (16 bytes), so every tile is made of eights.
    **dict.fromkeys(("tile_m", "tile_n"), rules.whole_number(8, 512, multiple_of=8)),
    **dict.fromkeys(words("tile_k warp_m warp_n"), rules.whole_number(8, 256, multiple_of=8)),
    "stages": rules.whole_number(1, 16),
    "split_k": rules.whole_number(1, 64),
    # Who adds the parts of a split K: the block that finishes a tile, or a second kernel.
    "split_mode": rules.one_of("serial", "parallel"),
    # How products are made: by matrix instructions of a 16-bit type, of tf32, of float32 in planes
    # of bfloat16, or one by one.
    "math": rules.one_of("mma", "tf32", "planes", "simt"),
    "swizzle": rules.one_of(1, 2, 4, 8, 16),
    "reuse": rules.one_of(False, True),
    "slices": rules.whole_number(1, 1024),
    "launches": rules.whole_number(1, 2),
    "blocks_per_sm": rules.whole_number(1, 32),
    # Which neighbours a box of pixels has in memory: those of an image, or those of other images.
    "order": rules.one_of("pixels", "images"),
    # Where a block keeps its images until it reads them again.
    "hold": rules.one_of("registers", "shared"),
    # How many share the work, about.
    "blocks": rules.whole_number(1, 4096),
    # Of one block: its threads, and how many images, samples, rows, or vectors for each thread, it
    # takes; of one thread, or one block: rows and columns of pixels, groups of channels.
    "threads": rules.whole_number(32, 1024, multiple_of=32),
    **dict.fromkeys(words("images units rows columns groups"), rules.whole_number(1, 64)),
    "samples": rules.whole_number(1, 32),
    "vectors": rules.whole_number(1, 16),
    # In which images are read, if that is not `layout`.
    "source_layout": rules.one_of("nchw", "nhwc"),
    # Threads that share a row of numbers.
    "lanes": rules.one_of(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    # An execution plan of cuDNN: its engine, and the values of its knobs.
    "plan": rules.pattern(r"eng[0-9]{1,4}(_k[0-9]{1,3}=-?[0-9]{1,9}){0,64}", "eng58_k2=12_k13=1"),
}
# Axes whose values a family finds on the machine: an empty list leaves them open.
FOUND_HERE = frozenset(("plan",))
# A tile is divided among warps without a rest, so each value on the left by each on the right.
_DIVIDED_BY = (("tile_m", "warp_m"), ("tile_n", "warp_n"))
_FAMILY_NAME = rules.pattern(r"[a-z][a-z0-9_]*", "implicit_gemm_conv")


@dataclass(frozen=True)
class SearchSpace:
    """The axes of every kernel family that an arch's file lists, in the order of the file."""

    arch: Arch
    families: Mapping[str, Axes]

    def configs(self, family: str) -> tuple[Attrs, ...]:
        """Every config of a family, the last axis changing fastest; none of an unknown family."""
        if family not in self._known:
            axes = self.families.get(family)
            choices = () if axes is None else itertools.product(*axes.values())
            self._known[family] = tuple(
                Attrs(dict(zip(axes or (), each, strict=True))) for each in choices
            )
        return self._known[family]

    def with_multiprocessors(self, count: int) -> SearchSpace:
        """For a part of the chip, or a smaller one of the same kind: kernels whose blocks wait
        for each other are divided so that they fit.
        """
        chip = self.arch.chip
        if chip is None or count >= chip.multiprocessors:
            return self
        arch = replace(self.arch, chip=replace(chip, multiprocessors=count))
        return SearchSpace(arch, self.families)

    @cached_property
    def _known(self) -> dict[str, tuple[Attrs, ...]]:
        """Configs by their family, made once: a step of a network may ask for hundreds."""
        return {}

    def admits(self, family: str, config: Attrs) -> bool:
        """Whether a config has the family's axes, with values that are listed, or that have the
        right form if the axis is open.
        """
        axes = self.families.get(family)
        return (
            axes is not None
            and set(config) == set(axes)
            and all(_rule(axis, axes[axis]).accepts(value) for axis, value in config.items())
        )

    @cached_property
    def digest(self) -> str:
        """The sha256 of the arch's facts and the families' axes, in any order of keys."""
        families = {family: dict(axes) for family, axes in self.families.items()}
        return digest({"arch": asdict(self.arch), "families": families})

    def __hash__(self) -> int:
        return hash(self.digest)


def _rule(axis: str, values: tuple[Scalar, ...]) -> rules.Rule:
    return rules.one_of(*values) if values else AXES[axis]


def load_search_space(arch_name: str) -> SearchSpace:
    """The search space of an arch. Raises InvalidSearchSpace for an unknown or broken one."""
    return parse_search_space(load_space_file(arch_name))


@lru_cache(maxsize=32)
def parse_search_space(file: rules.SpaceFile) -> SearchSpace:
    """The search space that a file describes."""
    families = {
        name: _axes(f"{file.path}: [families.{name}]", name, table)
        for name, table in file.families.items()
    }
    return SearchSpace(parse_arch(file), MappingProxyType(families))


def _axes(place: str, family: str, table: Any) -> Axes:
    rules.require(f"{place} name", family, _FAMILY_NAME)
    rules.require(place, table, rules.TABLE)
    rules.require_keys(place, table, required=(), optional=tuple(AXES))
    axes = {
        axis: rules.require_list(
            f"{place} {axis}", values, AXES[axis], may_be_empty=axis in FOUND_HERE
        )
        for axis, values in table.items()
    }
    for tile, warp in _DIVIDED_BY:
        _require_division(place, axes, tile, warp)
    return MappingProxyType(axes)


def _require_division(place: str, axes: Axes, tile: str, warp: str) -> None:
    pairs = itertools.product(axes.get(tile, ()), axes.get(warp, ()))
    for tile_size, warp_size in pairs:
        if int(tile_size) % int(warp_size):
            raise rules.invalid(
                f"{place} {tile}", tile_size, f"a multiple of every {warp}, here of {warp_size}"
            )
