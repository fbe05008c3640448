"""Which configs a search may try, and what a search-space file must not say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import InvalidSearchSpace
from plantune.kernels.registry import family_named
from plantune.space.arch import ARCH_NAMES
from plantune.space.rules import parse_space_file
from plantune.space.search_space import (
    AXES,
    SearchSpace,
    load_search_space,
    parse_search_space,
)

CUDA_ARCHS = [name for name in ARCH_NAMES if name != "cpu"]

CPU = 'arch = "cpu"\n[facts]\nkind = "cpu"\n[families.conv]\n'


def space_from(axes: str) -> SearchSpace:
    return parse_search_space(parse_space_file(CPU + axes, Path("cpu.toml")))


def test_configs_are_the_product_of_the_axes_in_file_order() -> None:
    space = space_from("stages = [3, 2]\nprepack = [true, false]")
    assert space.configs("conv") == (
        Attrs(stages=3, prepack=True),
        Attrs(stages=3, prepack=False),
        Attrs(stages=2, prepack=True),
        Attrs(stages=2, prepack=False),
    )


def test_a_family_without_axes_has_one_empty_config() -> None:
    assert space_from("").configs("conv") == (Attrs(),)


def test_an_unknown_family_has_no_configs() -> None:
    assert space_from("stages = [2]").configs("gemm") == ()


def test_the_loader_knows_no_family_names() -> None:
    space = space_from("[families.of_tomorrow]\nstages = [2]")
    assert space.configs("of_tomorrow") == (Attrs(stages=2),)


def test_listed_values_are_admitted_and_no_other() -> None:
    space = space_from("stages = [2, 3]\nprepack = [true]")
    assert all(space.admits("conv", config) for config in space.configs("conv"))
    assert not space.admits("gemm", Attrs(stages=2, prepack=True))
    for wrong in ({"stages": 4}, {"stages": 2.0}, {"prepack": 1}, {"stages": "2"}, {"swizzle": 1}):
        assert not space.admits("conv", Attrs({"stages": 2, "prepack": True, **wrong})), wrong
    assert not space.admits("conv", Attrs(stages=2))


def test_an_open_axis_lists_nothing_and_admits_what_has_its_form() -> None:
    space = space_from("plan = []\nprepack = [true]")
    assert space.configs("conv") == ()
    assert space.admits("conv", Attrs(plan="eng3_k1=2", prepack=True))
    assert not space.admits("conv", Attrs(plan="eng3_k1=2", prepack=False))
    assert not space.admits("conv", Attrs(plan="the first", prepack=True))


def test_an_axis_that_may_be_open_may_be_narrowed() -> None:
    space = space_from('plan = ["eng1", "eng2_k3=4"]')
    assert space.configs("conv") == (Attrs(plan="eng1"), Attrs(plan="eng2_k3=4"))
    assert space.admits("conv", Attrs(plan="eng1"))
    assert not space.admits("conv", Attrs(plan="eng3"))


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_every_shipped_config_is_listed_once(arch: str) -> None:
    space = load_search_space(arch)
    assert space.arch.name == arch
    for family in space.families:
        configs = space.configs(family)
        assert len(configs) >= 1 or () in space.families[family].values()
        assert len(set(configs)) == len(configs)


def test_the_cpu_tries_the_framework_onednn_gemm_and_inductor() -> None:
    space = load_search_space("cpu")
    both_layouts = (Attrs(layout="nchw"), Attrs(layout="nhwc"))
    assert space.configs("framework") == both_layouts
    assert space.configs("gemm") == both_layouts
    assert space.configs("inductor") == both_layouts
    assert space.configs("view") == (Attrs(),)
    assert space.configs("onednn_conv") == (
        Attrs(layout="nchw", prepack=True),
        Attrs(layout="nchw", prepack=False),
        Attrs(layout="nhwc", prepack=True),
        Attrs(layout="nhwc", prepack=False),
    )


@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_every_cuda_arch_tries_the_framework_and_the_implicit_gemm(arch: str) -> None:
    space = load_search_space(arch)
    assert space.configs("framework") == (Attrs(layout="nchw"), Attrs(layout="nhwc"))
    assert space.configs("view") == (Attrs(),)
    assert set(space.families["implicit_gemm_conv"]) == {
        "tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "stages", "split_k", "split_mode",
        "swizzle", "math",
    }  # fmt: skip


@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_pipelines_are_deeper_than_two_stages_only_with_cp_async(arch: str) -> None:
    space = load_search_space(arch)
    assert space.arch.cuda is not None
    deep = any(config["stages"] > 2 for config in space.configs("implicit_gemm_conv"))
    assert deep == ("cp_async" in space.arch.cuda.features)


@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_the_k_of_a_tile_is_made_of_whole_matrix_instructions(arch: str) -> None:
    space = load_search_space(arch)
    assert space.arch.cuda is not None
    for config in family_named("implicit_gemm_conv").configs(space):
        for shape in space.arch.cuda.mma_shapes_fp16 if config["math"] == "mma" else ():
            assert config["tile_k"] % shape.k == 0
            assert config["warp_m"] % shape.m == 0
            assert config["warp_n"] % shape.n == 0


def test_a_search_space_is_frozen() -> None:
    space = space_from("stages = [2]")
    with pytest.raises(dataclasses.FrozenInstanceError):
        space.families = {}  # type: ignore[misc]
    with pytest.raises(TypeError):
        space.families["conv"] = {}  # type: ignore[index]
    with pytest.raises(TypeError):
        space.families["conv"]["stages"] = (3,)  # type: ignore[index]


def test_the_digest_tells_spaces_apart_and_ignores_spelling() -> None:
    space = space_from("stages = [2, 3]\nprepack = [true]")
    same = space_from("# a comment\nprepack = [ true ]\nstages = [2,3]")
    assert (space.digest, hash(space)) == (same.digest, hash(same))
    assert space == same
    others = ("stages = [3, 2]\nprepack = [true]", "stages = [2, 3]", "")
    assert space.digest not in {space_from(other).digest for other in others}


def test_the_digests_of_all_archs_differ() -> None:
    assert len({load_search_space(arch).digest for arch in ARCH_NAMES}) == len(ARCH_NAMES)


BROKEN = [
    ("tile_q = [8]", r"\[families.conv\]: unknown key: got 'tile_q'; give only layout, prepack"),
    ("Tile_m = [8]", "unknown key: got 'Tile_m'"),
    ("stages = 2", "stages: got 2; give a list of one or more values, each a whole number"),
    ("stages = []", r"stages: got \[\]; give a list of one or more values"),
    ("stages = {a = 1}", "stages: got {'a': 1}; give a list"),
    ("stages = [2, 3, 2]", r"stages\[2\]: got 2; give each value once"),
    ("stages = [2, true]", r"stages\[1\]: got True; give a whole number from 1 to 16"),
    ("stages = [2.0]", r"stages\[0\]: got 2.0; give a whole number"),
    ('stages = ["2"]', r"stages\[0\]: got '2'; give a whole number"),
    ("stages = [[2]]", r"stages\[0\]: got \[2\]; give a whole number"),
    ("stages = [0]", r"stages\[0\]: got 0; give a whole number from 1 to 16"),
    ("stages = [17]", r"stages\[0\]: got 17; give a whole number from 1 to 16"),
    ("split_k = [0]", r"split_k\[0\]: got 0; give a whole number from 1 to 64"),
    ("split_k = [128]", r"split_k\[0\]: got 128; give a whole number from 1 to 64"),
    ("swizzle = [3]", r"swizzle\[0\]: got 3; give 1 or 2 or 4 or 8 or 16"),
    ("swizzle = [true]", r"swizzle\[0\]: got True; give 1 or 2"),
    ("tile_m = [12]", r"tile_m\[0\]: got 12; give .* from 8 to 512, a multiple of 8"),
    ("tile_m = [0]", r"tile_m\[0\]: got 0; give a whole number from 8"),
    ("tile_m = [-64]", r"tile_m\[0\]: got -64; give a whole number from 8"),
    ("tile_n = [1024]", r"tile_n\[0\]: got 1024; give a whole number from 8 to 512"),
    ("tile_k = [4]", r"tile_k\[0\]: got 4; give a whole number from 8 to 256"),
    ("warp_m = [20]", r"warp_m\[0\]: got 20; give .* a multiple of 8"),
    ("warp_n = [512]", r"warp_n\[0\]: got 512; give a whole number from 8 to 256"),
    ("tile_m = [64, 96]\nwarp_m = [32, 64]", "tile_m: got 96; give a multiple of every warp_m, h"),
    ("tile_n = [32]\nwarp_n = [64]", "tile_n: got 32; give a multiple of every warp_n, here of 64"),
    ("prepack = [1]", r"prepack\[0\]: got 1; give False or True"),
    ('prepack = ["true"]', r"prepack\[0\]: got 'true'; give False or True"),
    ('layout = ["NHWC"]', r"layout\[0\]: got 'NHWC'; give 'nchw' or 'nhwc'"),
    ("layout = [true]", r"layout\[0\]: got True; give 'nchw' or 'nhwc'"),
    ("[families.Conv]", r"\[families.Conv\] name: got 'Conv'; give a text such as"),
    ('[families."../conv"]', "name: got '../conv'; give a text such as"),
    ("[families]\ngemm = 1", r"\[families.gemm\]: got 1; give a table"),
    ("[[families.gemm]]", r"\[families.gemm\]: got \[{}\]; give a table"),
    ("[families.conv]", "not TOML"),
]


@pytest.mark.parametrize(("axes", "message"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_family_is_refused_with_place_value_and_remedy(axes: str, message: str) -> None:
    with pytest.raises(InvalidSearchSpace, match=message) as raised:
        space_from(axes)
    assert str(raised.value).startswith("cpu.toml: ")


def test_every_axis_word_accepts_something_and_no_null() -> None:
    samples = ("nchw", "eng0", "serial", "mma", "images", "shared", True, False, *range(1, 513))
    for axis, rule in AXES.items():
        assert any(rule.accepts(sample) for sample in samples), axis
        assert not rule.accepts(None), axis


def test_facts_are_checked_with_the_families() -> None:
    with pytest.raises(InvalidSearchSpace, match="kind: got 'cuda'; give 'cpu'"):
        parse_search_space(
            parse_space_file(CPU.replace('kind = "cpu"', 'kind = "cuda"'), Path("cpu.toml"))
        )


def test_a_space_is_read_and_multiplied_once() -> None:
    space = load_search_space("sm90")
    assert load_search_space("sm90") is space
    assert space.configs("hopper_conv") is space.configs("hopper_conv")
