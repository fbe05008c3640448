"""Recurrent layers over a sequence, and their gradients, each in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.errors import BuildError
from plantune.kernels.families import gru_scan, gru_scan_grad, lstm_scan, lstm_scan_grad
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.recurrent import scan_family
from plantune.kernels.registry import candidates, why_not
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

ARCH = load_arch("sm90")
MODULES = (gru_scan, gru_scan_grad, lstm_scan, lstm_scan_grad)
FAMILIES = {module.FAMILY.name: module.FAMILY for module in MODULES}
SMALL = Attrs(units=16, samples=16)


def scan(kind, steps=3, samples=5, hidden=128, resets=True):
    gates, states = (3, 1) if kind.startswith("gru") else (4, 2)

    def emit(b):
        made = 2 * states if kind.endswith("grad") else 0
        given = [b.x(steps, samples, hidden) for _ in range(made)]
        given += [b.x(steps, samples, gates * hidden)]
        given += [b.x(samples, hidden) for _ in range(states)]
        given += [b.w(gates * hidden, hidden), b.w(gates * hidden)]
        given += [b.x(steps, samples, dtype="bool")] if resets else []
        return b.all(kind, *given, resets=resets)

    return emit


@pytest.mark.parametrize("kind", FAMILIES)
def test_they_refuse(step_of, kind):
    family = FAMILIES[kind]
    assert "written for float16" in str(family.why_not_step(step_of(scan(kind), "float64")))
    odd = family.why_not_step(step_of(scan(kind, hidden=72), "float32"))
    assert odd == "warps divide hidden units by 64, got 72"
    assert "by 128, got 192" in str(family.why_not_step(step_of(scan(kind, hidden=192), "float16")))


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "config", "reason"),
    [
        ("gru_scan", {"hidden": 512}, "float32", (32, 8), "weights take 192 registers"),
        ("gru_scan", {"hidden": 512}, "float32", (16, 32), "weights, words and results take 208"),
        ("lstm_scan_grad", {}, "float16", (32, 32), "weights, words and results take 272"),
        ("gru_scan", {}, "float16", (8, 32), "tiles have 16 rows"),
        ("lstm_scan_grad", {}, "float16", (16, 8), "a thread owns no whole result"),
    ],
)
def test_they_refuse_configs(step_of, kind, sizes, dtype, config, reason):
    step = step_of(scan(kind, **sizes), dtype)
    if isinstance(config, tuple):
        config = Attrs(units=config[0], samples=config[1])
    found = FAMILIES[kind].why_not_config(FAMILIES[kind].parts(step), config, ARCH)
    assert str(found).startswith(reason)


@pytest.mark.parametrize(
    ("steps", "samples", "room", "launches"),
    [
        (9, 64, 132, (4,)),  # 32 blocks have the units of 16 samples
        (9, 64, 114, (3, 1)),
        (9, 200, 132, (4, 4, 4, 1)),
        (9, 64, 31, ()),
        (1, 256, 31, (16,)),  # a step alone waits for nobody
    ],
)
def test_groups_of_samples_that_do_not_fit_follow_in_launches(
    step_of, steps, samples, room, launches
):
    family = FAMILIES["gru_scan"]
    parts = family.parts(step_of(scan("gru_scan", steps, samples, 512), "float16"))
    assert family.division(parts, SMALL).launches(room) == launches
    arch = replace(ARCH, chip=replace(ARCH.chip, multiprocessors=room))
    reason = None if launches else f"32 blocks must run at once on {room} multiprocessors"
    assert family.why_not_config(parts, SMALL, arch) == reason


@pytest.mark.parametrize(
    ("kind", "dtype", "units", "samples"),
    [
        ("gru_scan", "float32", 16, 16),
        ("gru_scan_grad", "bfloat16", 32, 8),
        ("lstm_scan", "float32", 8, 32),
        ("lstm_scan_grad", "float16", 16, 16),
    ],
)
def test_they_build_within_the_registers(step_of, build_within_limits, kind, dtype, units, samples):
    family, config = FAMILIES[kind], Attrs(units=units, samples=samples)
    step = step_of(scan(kind, 32, 64, 512), dtype)
    assert why_not(step, Candidate(family.name, config), load_search_space("sm90")) is None
    build_within_limits(family, step, config, ARCH)


class TooFew:
    """A kernel of which only some blocks fit beside each other."""

    def __init__(self, binary, *, cooperative):
        assert cooperative

    def blocks_at_once(self, threads, shared_bytes):
        return 7


@pytest.mark.parametrize("kind", FAMILIES)
def test_they_do_not_begin_where_their_blocks_do_not_fit(step_of, monkeypatch, kind):
    """A search would time torch's loop under their name."""
    monkeypatch.setattr(scan_family, "Kernel", TooFew)
    family, step = FAMILIES[kind], step_of(scan(kind), "float32")
    with pytest.raises(BuildError, match="8 blocks must run at once, 7 can"):
        family.bind(family.parts(step), SMALL, Frame({}))


class Recorded:
    """A kernel that keeps what it is launched with."""

    launched: ClassVar = []

    def __init__(self, binary, *, cooperative):
        assert cooperative

    def blocks_at_once(self, threads, shared_bytes):
        return 132

    def launch(self, stream, grid, threads, arguments, *, shared_bytes):
        self.launched.append((grid, arguments[0]))


def test_on_fewer_multiprocessors_a_guess_divides_otherwise(step_of):
    """All blocks fit: a second launch would cost as much as the first."""
    family, step = FAMILIES["gru_scan"], step_of(scan("gru_scan", 32, 64, 512), "float16")
    parts, found = family.parts(step), {}
    for count in (132, 114):
        space = load_search_space("sm90").with_multiprocessors(count)
        legal = [c.config for c in candidates(step, space) if c.family == "gru_scan"]
        best = min(legal, key=lambda config: family.estimate_us(parts, config, space.arch))
        found[count] = family.division(parts, best)
    assert [len(d.launches(count)) for count, d in found.items()] == [1, 1]
    assert found[132].of_group * found[132].groups == 128
    assert load_search_space("sm90").with_multiprocessors(140) is load_search_space("sm90")


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(scan_family, "Kernel", Recorded)
    monkeypatch.setattr(Recorded, "launched", [])
    return Recorded.launched


def test_each_launch_takes_its_samples_and_counts_itself(step_of, recorded):
    family, step = FAMILIES["gru_scan"], step_of(scan("gru_scan", 3, 330, 512), "float16")
    values = {name: torch.zeros(t.shape) for name, t in (*step.inputs, *step.outputs)}
    family.bind(family.parts(step), SMALL, Frame(values)).launch(0)
    found = [(grid[0], arguments.first, arguments.samples) for grid, arguments in recorded]
    assert found == [*((128, 64 * at, 330) for at in range(5)), (32, 320, 330)]
    assert len({arguments.launches for _, arguments in recorded}) == 6
    assert len({arguments.words for _, arguments in recorded}) == 1


def test_the_gradient_of_a_step_alone_reads_its_state_in_place(step_of, recorded):
    family, step = (
        FAMILIES["lstm_scan_grad"],
        step_of(scan("lstm_scan_grad", 1, resets=False), "float32"),
    )
    parts = family.parts(step)
    values = {name: torch.randn(t.shape) for name, t in (*step.inputs, *step.outputs)}
    room = torch.empty(family.workspace_bytes(parts, SMALL), dtype=torch.uint8)
    family.bind(parts, SMALL, Frame(values, workspace=room)).launch(0)
    ((_, arguments),) = recorded
    assert arguments.cell_before == values[parts.names["cell"]].data_ptr()
    before, rows = values[parts.names["state"]], values[parts.names["dgates"]][0]
    torch.testing.assert_close(values[parts.names["dweight"]], rows.t() @ before)


def test_cells_that_nobody_reads_have_memory_of_their_own(step_of, recorded):
    family, step = FAMILIES["lstm_scan"], step_of(lambda b: scan("lstm_scan")(b)[0], "float16")
    values = {name: torch.zeros(t.shape) for name, t in (*step.inputs, *step.outputs)}
    family.bind(family.parts(step), SMALL, Frame(values)).launch(0)
    ((grid, arguments),) = recorded
    assert grid == (8, 1, 1)
    assert all(getattr(arguments, name) for name, *_ in arguments._fields_ if name != "first")
    assert arguments.y == values[step.outputs[0][0]].data_ptr()
    assert arguments.cells != arguments.y


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "dtype", "resets"),
    [
        ((7, 64, 512), "float16", False),
        ((5, 64, 512), "float32", True),
        ((3, 5, 128), "float16", True),
        ((1, 1, 128), "float32", False),
        ((4, 17, 256), "float32", True),
        ((33, 9, 256), "bfloat16", True),
        ((1, 300, 512), "float16", True),
        ((3, 150, 512), "float16", True),  # in several launches
    ],
)
def test_they_are_right(step_of, assert_legal_configs_right, sizes, dtype, resets, kind):
    step = step_of(scan(kind, *sizes, resets), dtype)
    assert FAMILIES[kind].why_not_step(step) is None
    assert_legal_configs_right(FAMILIES[kind], step)
