from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import BuildError
from plantune.kernels import build as build_module
from plantune.kernels.build import build, build_all
from plantune.kernels.family import Binding, Candidate, KernelFamily, Parts
from plantune.kernels.registry import resolve

CANDIDATE = Candidate("counting", Attrs(tile_m=64))


class Counting(KernelFamily):
    """Counts how often it builds what."""

    name: ClassVar = "counting"
    arch_kinds = frozenset(("cpu",))

    def __init__(self):
        self.built = []
        self.fails = False

    def read(self, step):
        return Parts(step)

    def build(self, parts, config, arch):
        time.sleep(0.01)
        self.built.append((parts.step.signature, config))
        if self.fails:
            raise BuildError("no compiler")
        return len(self.built)

    def bind(self, parts, config, frame):
        return Binding(lambda stream: None)


@pytest.fixture
def counting(register):
    family = Counting()
    register(counting=family)
    return family


def relu(b, *shape):
    return b("relu", b.x(*shape))


def test_nothing_is_kept_of_steps_that_build_nothing(step_of, space, counting, monkeypatch):
    """Each value of a setting that a network multiplies by makes another step."""
    monkeypatch.setattr(counting, "build", lambda parts, config, arch: None)
    building = dict(build_module._building)
    for size in range(3, 6):
        step = step_of(lambda b, size=size: relu(b, 2, size))
        assert [build(resolve(step, CANDIDATE), space.arch) for _ in range(2)] == [None, None]
    assert build_module._built == {}
    assert build_module._building == building


def test_equal_steps_build_once(step_of, space, counting):
    steps = [
        step_of(lambda b: relu(b, 2, 3)),
        step_of(lambda b: (b.x(7), relu(b, 2, 3))[1]),
    ]
    assert steps[0].inputs != steps[1].inputs
    assert [build(resolve(step, CANDIDATE), space.arch) for step in steps] == [1, 1]
    assert len(counting.built) == 1


def test_another_shape_config_or_op_builds_again(step_of, space, counting):
    step = step_of(lambda b: relu(b, 2, 3))
    build(resolve(step, CANDIDATE), space.arch)
    build(resolve(step_of(lambda b: relu(b, 3, 2)), CANDIDATE), space.arch)
    build(resolve(step_of(lambda b: b("sigmoid", b.x(2, 3))), CANDIDATE), space.arch)
    build(resolve(step, Candidate("counting", Attrs(tile_m=128))), space.arch)
    assert len(counting.built) == 4


def test_threads_share_one_build(step_of, space, counting):
    step = step_of(lambda b: relu(b, 2, 3))
    chosen = resolve(step, CANDIDATE)
    threads = [threading.Thread(target=build, args=(chosen, space.arch)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counting.built) == 1


def test_a_failed_build_is_not_a_kernel(step_of, space, counting):
    step = step_of(lambda b: relu(b, 2, 3))
    counting.fails = True
    with pytest.raises(BuildError, match="no compiler"):
        build(resolve(step, CANDIDATE), space.arch)
    counting.fails = False
    assert build(resolve(step, CANDIDATE), space.arch) == 2


def test_a_family_that_compiles_nothing(step_of, space):
    step = step_of(lambda b: relu(b, 2, 3))
    assert build(resolve(step, Candidate("framework", Attrs(layout="nchw"))), space.arch) is None


class TestAll:
    @pytest.fixture
    def steps(self, step_of):
        return [step_of(lambda b, n=n: relu(b, n)) for n in range(1, 5)]

    @pytest.fixture
    def compiling(self, counting, monkeypatch):
        monkeypatch.setattr(Counting, "source", lambda self, parts, config, arch: "source")
        return counting

    def test_compilers_run_beside_each_other(self, steps, space, compiling, monkeypatch):
        meeting = threading.Barrier(len(steps), timeout=10)
        monkeypatch.setattr(Counting, "build", lambda *_: meeting.wait())
        monkeypatch.setattr("os.cpu_count", lambda: len(steps))
        build_all([resolve(step, CANDIDATE) for step in steps], space.arch)

    def test_what_fails_is_raised(self, steps, space, compiling):
        compiling.fails = True
        with pytest.raises(BuildError, match="no compiler"):
            build_all([resolve(step, CANDIDATE) for step in steps], space.arch)

    def test_what_compiles_nothing_is_left_to_its_turn(self, steps, space, counting):
        build_all([resolve(step, CANDIDATE) for step in steps], space.arch)
        assert counting.built == []

    def test_after_the_main_thread_has_ended_each_is_left_to_its_turn(
        self, steps, space, compiling, monkeypatch
    ):
        """A thread that still works may need kernels, and Python gives no pool any more."""

        def refuses(*_):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

        monkeypatch.setattr(build_module.ThreadPoolExecutor, "submit", refuses)
        build_all([resolve(step, CANDIDATE) for step in steps], space.arch)
        assert compiling.built == []
        assert build(resolve(steps[0], CANDIDATE), space.arch) is not None
