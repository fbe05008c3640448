"""What plantune says about each arch, and what it refuses in an arch's file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plantune.base import paths
from plantune.errors import InvalidSearchSpace, PlantuneError
from plantune.space.arch import (
    ARCH_NAMES,
    FEATURES,
    Arch,
    CudaFacts,
    MmaShape,
    load_arch,
    load_space_file,
    parse_arch,
)
from plantune.space.rules import SpaceFile, parse_space_file

CUDA_ARCHS = [name for name in ARCH_NAMES if name != "cpu"]

SM90 = """
arch = "sm90"
[facts]
kind = "cuda"
compute_capability = [9, 0]
nvrtc_arch = "sm_90a"
nvrtc_min = [12, 0]
warp_size = 32
threads_per_block_max = 1024
threads_per_sm = 2048
blocks_per_sm = 32
registers_per_sm = 65536
registers_per_thread_max = 255
shared_memory_per_sm_bytes = 233472
shared_memory_per_block_bytes = 232448
shared_memory_reserved_per_block_bytes = 1024
mma_shapes_fp16 = ["m16n8k8", "m16n8k16"]
features = ["tma", "wgmma"]
[families]
"""


def arch_from(text: str, file: str = "sm90.toml") -> Arch:
    return parse_arch(parse_space_file(text, Path(file)))


def facts_of(name: str) -> CudaFacts:
    cuda = load_arch(name).cuda
    assert cuda is not None
    return cuda


def test_every_arch_has_a_file_and_every_file_an_arch() -> None:
    stems = {path.stem for path in paths.data_folder("search_spaces").glob("*.toml")}
    assert {stem for stem in stems if re.fullmatch(r"cpu|sm\d+", stem)} == set(ARCH_NAMES)


def test_the_cpu_has_no_cuda_facts() -> None:
    assert load_arch("cpu") == Arch("cpu", cuda=None)
    assert load_arch("cpu").kind == "cpu"


@pytest.mark.parametrize("name", CUDA_ARCHS)
def test_a_cuda_arch_is_named_by_its_compute_capability(name: str) -> None:
    major, minor = facts_of(name).compute_capability
    assert load_arch(name).kind == "cuda"
    assert name == f"sm{major}{minor}"


@pytest.mark.parametrize(
    ("name", "block_kib", "sm_kib", "threads", "blocks"),
    [
        ("sm70", 96, 96, 2048, 32),
        ("sm75", 64, 64, 1024, 16),
        ("sm80", 163, 164, 2048, 32),
        ("sm86", 99, 100, 1536, 16),
        ("sm89", 99, 100, 1536, 24),
        ("sm90", 227, 228, 2048, 32),
        ("sm100", 227, 228, 2048, 32),
        ("sm120", 99, 100, 1536, 24),
    ],
)
def test_limits_of_a_multiprocessor(
    name: str, block_kib: int, sm_kib: int, threads: int, blocks: int
) -> None:
    facts = facts_of(name)
    assert facts.shared_memory_per_block_bytes == block_kib * 1024
    assert facts.shared_memory_per_sm_bytes == sm_kib * 1024
    assert facts.shared_memory_reserved_per_block_bytes == (sm_kib - block_kib) * 1024
    assert (facts.threads_per_sm, facts.blocks_per_sm) == (threads, blocks)
    assert (facts.warp_size, facts.threads_per_block_max) == (32, 1024)
    assert (facts.registers_per_sm, facts.registers_per_thread_max) == (65536, 255)


@pytest.mark.parametrize(
    ("feature", "archs"),
    [
        ("ldmatrix", ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]),
        ("cp_async", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]),
        ("bf16", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]),
        ("tf32", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]),
        ("fp8", ["sm89", "sm90", "sm100", "sm120"]),
        ("tma", ["sm90", "sm100", "sm120"]),
        ("clusters", ["sm90", "sm100", "sm120"]),
        ("wgmma", ["sm90"]),
        ("tcgen05", ["sm100"]),
    ],
)
def test_which_archs_have_a_feature(feature: str, archs: list[str]) -> None:
    assert feature in FEATURES
    assert [name for name in CUDA_ARCHS if feature in facts_of(name).features] == archs


def test_each_arch_lists_its_own_matrix_instructions() -> None:
    assert facts_of("sm70").mma_shapes_fp16 == (MmaShape(8, 8, 4),)
    assert facts_of("sm75").mma_shapes_fp16 == (MmaShape(16, 8, 8),)
    assert facts_of("sm80").mma_shapes_fp16 == (MmaShape(16, 8, 8), MmaShape(16, 8, 16))
    assert str(MmaShape(16, 8, 16)) == "m16n8k16"


@pytest.mark.parametrize(
    ("name", "nvrtc_arch", "version", "reason"),
    [
        ("sm70", "sm_70", (12, 9), None),
        ("sm70", "sm_70", (13, 0), "sm_70 needs an NVRTC older than 13.0, got 13.0"),
        ("sm75", "sm_75", (13, 0), None),
        ("sm75", "sm_75", (11, 8), "sm_75 needs NVRTC 12.0 or newer, got 11.8"),
        ("sm90", "sm_90a", (12, 0), None),
        ("sm100", "sm_100a", (12, 8), None),
        ("sm100", "sm_100a", (12, 6), "sm_100a needs NVRTC 12.8 or newer, got 12.6"),
        ("sm120", "sm_120", (12, 6), "sm_120 needs NVRTC 12.8 or newer, got 12.6"),
    ],
)
def test_which_nvrtc_compiles_for_an_arch(
    name: str, nvrtc_arch: str, version: tuple[int, int], reason: str | None
) -> None:
    assert facts_of(name).nvrtc_arch == nvrtc_arch
    assert facts_of(name).why_not_nvrtc(version) == reason


@pytest.mark.parametrize("name", ["sm91", "SM90", "../sm90", "", "sm90.toml"])
def test_an_unknown_arch_is_refused_before_it_becomes_a_path(name: str) -> None:
    with pytest.raises(InvalidSearchSpace, match="give 'cpu' or 'sm70' or"):
        load_arch(name)


def test_the_text_that_the_broken_ones_start_from_is_right() -> None:
    facts = arch_from(SM90).cuda
    assert facts is not None
    assert facts.features == ("tma", "wgmma")
    assert facts.nvrtc_below is None


BROKEN = [
    ("[families]", "[families", "not TOML"),
    ("warp_size = 32", "warp_size = 32\nwarp_size = 32", "not TOML"),
    ("[families]", "", "top level: missing families"),
    ("[families]", "[familes]", "top level: unknown key: got 'familes'; give only arch, facts"),
    (
        'arch = "sm90"\n[facts]',
        'facts = 1\narch = "sm90"\n[families.f]',
        r"\[facts\]: got 1; give a",
    ),
    ('"sm90"', '"sm80"', "arch: got 'sm80'; give 'sm90'"),
    ('"sm90"', "90", "arch: got 90; give 'sm90'"),
    ('"cuda"', '"cpu"', "kind: got 'cpu'; give 'cuda'"),
    ('kind = "cuda"\n', "", "missing kind"),
    ("warp_size = 32\n", "", "missing warp_size"),
    ("warp_size", "warp_sise", "unknown key: got 'warp_sise'; give only kind, compute_capability"),
    ("warp_size = 32", "warp_size = 64", "warp_size: got 64; give 32"),
    ("warp_size = 32", "warp_size = 32.0", "warp_size: got 32.0; give 32"),
    ("blocks_per_sm = 32", "blocks_per_sm = true", "blocks_per_sm: got True; give a whole number"),
    ("blocks_per_sm = 32", "blocks_per_sm = 0", "blocks_per_sm: got 0; give a whole number from 1"),
    ("= 2048", '= "2048"', "threads_per_sm: got '2048'; give a whole number"),
    ("= 65536", "= 65535", "registers_per_sm: got 65535; give .* a multiple of 256"),
    ("= 255", "= 4", "registers_per_thread_max: got 4; give a whole number from 32"),
    ("= 1024\nthreads", "= 1000\nthreads", "threads_per_block_max: got 1000; give .* of 32"),
    ("= 1024\nthreads", "= 4096\nthreads", "threads_per_block_max: got 4096; give at most threads"),
    ("= 233472", "= 228", "shared_memory_per_sm_bytes: got 228; give a whole number from 1024"),
    ("= 232448", "= 233472", "shared_memory_per_block_bytes: got 233472; give at most"),
    ("_bytes = 1024", "_bytes = 1", "shared_memory_reserved_per_block_bytes: got 1; give"),
    ("[9, 0]", "[9]", r"compute_capability: got \[9\]; give a pair \[major, minor\]"),
    ("[9, 0]", "[9, true]", "compute_capability: got .9, True.; give a pair"),
    ("[9, 0]", "[9, -1]", "compute_capability: got .9, -1.; give a pair"),
    ("[9, 0]", "9.0", "compute_capability: got 9.0; give a pair"),
    ("[9, 0]", "[8, 0]", r"compute_capability: got \(8, 0\); give the numbers of the arch, sm90"),
    ("[9, 0]", "[8, 10]", r"compute_capability: got \(8, 10\); give the numbers of the arch"),
    ('"sm_90a"', '"sm90a"', "nvrtc_arch: got 'sm90a'; give a text such as 'sm_90a'"),
    ('"sm_90a"', '"sm_100a"', "nvrtc_arch: got 'sm_100a'; give sm_90"),
    ("[12, 0]", '"12.0"', "nvrtc_min: got '12.0'; give a pair"),
    ("[12, 0]", "[12, 0]\nnvrtc_below = 13", "nvrtc_below: got 13; give a pair"),
    ("[12, 0]", "[12, 0]\nnvrtc_below = [12, 0]", "nvrtc_below: got .*; give a version after"),
    (
        '"m16n8k8"',
        '"16x8x8"',
        r"mma_shapes_fp16\[0\]: got '16x8x8'; give a text such as 'm16n8k16'",
    ),
    ('"m16n8k8"', '"m16n8k16"', r"mma_shapes_fp16\[1\]: got 'm16n8k16'; give each value once"),
    ('["m16n8k8", "m16n8k16"]', "[]", r"mma_shapes_fp16: got \[\]; give a list of one or more"),
    ('"tma"', '"tmo"', r"features\[0\]: got 'tmo'; give 'bf16' or"),
    ('["tma", "wgmma"]', '"tma"', "features: got 'tma'; give a list"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), BROKEN, ids=[row[2] for row in BROKEN])
def test_a_broken_file_is_refused_with_place_value_and_remedy(
    right: str, wrong: str, message: str
) -> None:
    assert SM90.count(right) >= 1
    with pytest.raises(InvalidSearchSpace, match=message) as raised:
        arch_from(SM90.replace(right, wrong, 1))
    assert str(raised.value).startswith("sm90.toml: ")


def test_the_cpu_takes_no_cuda_facts() -> None:
    text = 'arch = "cpu"\n[facts]\nkind = "cpu"\nwarp_size = 32\n[families]\n'
    with pytest.raises(InvalidSearchSpace, match="unknown key: got 'warp_size'; give only kind"):
        arch_from(text, "cpu.toml")


def test_the_cpu_is_of_no_other_kind() -> None:
    text = 'arch = "cpu"\n[facts]\nkind = "cuda"\n[families]\n'
    with pytest.raises(InvalidSearchSpace, match="kind: got 'cuda'; give 'cpu'"):
        arch_from(text, "cpu.toml")


def test_a_file_that_is_named_after_no_arch_is_refused() -> None:
    with pytest.raises(InvalidSearchSpace, match="file name: got 'sm91'"):
        arch_from(SM90.replace("sm90", "sm91"), "sm91.toml")


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package in a checkout of its own."""
    folder = tmp_path / "plantune"
    folder.mkdir()
    monkeypatch.setattr(paths, "PACKAGE_FOLDER", folder)
    return folder


def test_a_checkout_is_read_beside_the_package_and_a_wheel_inside_it(package_folder: Path) -> None:
    beside = package_folder.parent / "search_spaces"
    inside = package_folder / "_data" / "search_spaces"
    beside.mkdir()
    assert paths.data_folder("search_spaces") == beside
    inside.mkdir(parents=True)
    assert paths.data_folder("search_spaces") == inside


def test_an_incomplete_installation_is_said_to_be_one(package_folder: Path) -> None:
    with pytest.raises(PlantuneError, match=r"is neither .* install plantune again"):
        paths.data_folder("search_spaces")
    (package_folder / "_data" / "search_spaces").mkdir(parents=True)
    with pytest.raises(InvalidSearchSpace, match=r"sm90\.toml.*install plantune again"):
        load_space_file("sm90")


def including(folder: Path, common: str, own: str) -> SpaceFile:
    """A file for CPUs that includes another."""
    (folder / "common.toml").write_text(common)
    text = f'arch = "cpu"\ninclude = "common"\n{own}[facts]\nkind = "cpu"\n'
    return parse_space_file(text, folder / "cpu.toml")


def include(folder: Path, common: str, own: str) -> Mapping[str, Any]:
    """The families of such a file."""
    return including(folder, common, own).families


def test_an_included_family_may_get_other_values_and_company(tmp_path: Path) -> None:
    common = "[families.conv]\nstages = [2, 3]\ntile_m = [64]\n[families.view]\n"
    families = include(tmp_path, common, "[families.conv]\nstages = [2]\n[families.own]\n")
    assert families == {"conv": {"stages": [2], "tile_m": [64]}, "view": {}, "own": {}}
    assert list(families["conv"]) == ["stages", "tile_m"]


def test_costs_are_those_of_the_family_of_the_arch_and_of_any(tmp_path: Path) -> None:
    common = "[families]\n[costs.any]\nlaunch_us = 1.5\n[costs.conv]\nflops_per_us = 2e8\n"
    own = "[costs.conv]\nlaunch_us = 2\n[costs.any]\nbytes_per_us = 3e6\n"
    arch = parse_arch(including(tmp_path, common, own))
    assert arch.cost("conv") == {"launch_us": 2, "flops_per_us": 2e8, "bytes_per_us": 3e6}
    assert arch.cost("gemm") == {"launch_us": 1.5, "bytes_per_us": 3e6}
    assert hash(arch) == hash(load_arch("cpu"))


@pytest.mark.parametrize("name", ARCH_NAMES)
def test_every_arch_has_what_any_guess_needs(name: str) -> None:
    cost = load_arch(name).cost("of a user's own")
    assert {"launch_us", "flops_per_us", "bytes_per_us"} <= cost.keys()
    assert all(value > 0 for value in cost.values())


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ("costs = 1", r"\[costs\]: got 1; give a table"),
        ("[costs]\nconv = 1", r"\[costs.conv\]: got 1; give a table"),
        ("[costs.conv]\nlaunch_us = true", r"\[costs.conv\] launch_us: got True; give a number"),
        ("[costs.conv]\nlaunch_us = 0", r"\[costs.conv\] launch_us: got 0; give a number"),
    ],
)
def test_a_broken_cost_is_named(tmp_path: Path, costs: str, words: str) -> None:
    with pytest.raises(InvalidSearchSpace, match=words):
        parse_arch(including(tmp_path, "[families]", f"{costs}\n"))


@pytest.mark.parametrize(
    ("common", "words"),
    [
        ("[families", "not TOML"),
        ("", "missing families"),
        ("families = 1", r"common.toml: \[families\]: got 1"),
        ("[families]\n[facts]", "unknown key"),
    ],
)
def test_a_broken_included_file_is_named(tmp_path: Path, common: str, words: str) -> None:
    with pytest.raises(InvalidSearchSpace, match=words):
        include(tmp_path, common, "")


def test_an_included_file_has_a_plain_name_and_exists(tmp_path: Path) -> None:
    text = 'arch = "cpu"\ninclude = "{}"\n[facts]\nkind = "cpu"\n'
    for name, words in (("../cpu", "include: got"), ("nothing", r"nothing\.toml: ")):
        with pytest.raises(InvalidSearchSpace, match=words):
            parse_space_file(text.format(name), tmp_path / "cpu.toml")


def test_a_file_that_is_not_utf8_is_refused(package_folder: Path) -> None:
    folder = package_folder / "_data" / "search_spaces"
    folder.mkdir(parents=True)
    (folder / "sm90.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSearchSpace, match=r"sm90\.toml: .*utf-8"):
        load_space_file("sm90")
