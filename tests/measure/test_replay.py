"""What is captured once and replayed, with a device whose graphs are calls of this process."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.devices.device import Device
from plantune.errors import CaptureError, WrongResult
from plantune.graph.types import TensorType
from plantune.kernels.family import Binding, Candidate
from plantune.kernels.registry import resolve
from plantune.kernels.weights.constants import ALIGNMENT_BYTES, Constant, Room, by_pixels
from plantune.measure.numerics import check
from plantune.measure.step_alone import FEW_LAUNCHES, GRAPH_US, MOST_LAUNCHES, TimedStep

from .conftest import output


class Graphs(Device):
    """Has graphs: a replay is another call."""

    captures = True

    def __init__(self) -> None:
        self.captured_calls = 0

    def captured(self, call):
        self.captured_calls += 1
        call()
        return call


@pytest.fixture
def graphs(monkeypatch):
    device = Graphs()
    for module in ("trial", "numerics", "step_alone"):
        monkeypatch.setattr(f"plantune.measure.{module}.device_for", lambda arch: device)
    return device


def test_refresh_and_launch_are_captured(graphs, biased, fake, check_fake):
    class Prepares(fake):
        def bind(self, parts, config, frame):
            kept = torch.empty(3)
            launch = super().bind(parts, config, frame).launch
            return Binding(launch, lambda: kept.copy_(frame.values["bias"]))

    check_fake(biased, Prepares(lambda step, frame: None))
    assert graphs.captured_calls == 2


def test_the_framework_replays_what_it_adopts(graphs, step_of, space):
    def emit(b):
        x, w = b.input("x", TensorType((2, 4, 6, 6))), b.parameter("w", TensorType((8, 4, 3, 3)))
        return b.emit("conv2d", x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)

    for layout in ("nchw", "nhwc"):
        check(step_of(emit), Candidate("framework", Attrs(layout=layout)), space)
    assert graphs.captured_calls == 2


def test_a_launch_that_is_in_no_graph(graphs, relu, fake, check_fake, monkeypatch):
    """A kernel that goes to another stream runs while it is captured, and never again."""
    monkeypatch.setattr(graphs, "captured", lambda call: (call(), lambda: None)[1])
    with pytest.raises(WrongResult, match=r"first replay: 'relu'\[.*is nan instead of"):
        check_fake(relu, fake(lambda step, frame: None))


def test_a_launch_that_cannot_be_captured(graphs, relu, fake, check_fake, monkeypatch):
    def refuses(call):
        raise CaptureError("no graph can be captured: it synchronizes")

    monkeypatch.setattr(graphs, "captured", refuses)
    with pytest.raises(WrongResult, match="capture: no graph can be captured: it synchronizes"):
        check_fake(relu, fake(lambda step, frame: None))


def test_a_replay_reads_the_data_of_now(graphs, relu, fake, check_fake):
    """A kernel that copies its input when it is launched for the last time directly."""
    seen, kept = [], []

    def twist(step, frame):
        seen.append(frame.values["x"].clone())
        if graphs.captured_calls:
            kept.append(seen[-1])
            output(step, frame).copy_(kept[0].relu())

    with pytest.raises(WrongResult, match=r"(first|second) replay: 'relu'\["):
        check_fake(relu, fake(twist))


@pytest.mark.parametrize(
    ("once_us", "launches"), [(0.01, MOST_LAUNCHES), (10.0, 15), (30.0, 5), (5000.0, FEW_LAUNCHES)]
)
def test_graphs_are_long_enough_for_the_clock(graphs, relu, space, once_us, launches):
    timed = TimedStep(resolve(relu, Candidate("framework", Attrs(layout="nchw"))), space.arch)
    call, found = timed.repeated(lambda call: once_us * FEW_LAUNCHES)
    assert found == launches
    assert found == MOST_LAUNCHES or found * once_us >= GRAPH_US
    call()


def test_the_cpu_times_the_launch_itself(relu, space):
    timed = TimedStep(resolve(relu, Candidate("framework", Attrs(layout="nchw"))), space.arch)
    assert timed.repeated(lambda call: 0.0) == (timed.launch, 1)


@pytest.fixture
def convolution(step_of):
    def emit(b):
        x, w = b.input("x", TensorType((2, 4, 6, 6))), b.parameter("w", TensorType((8, 4, 3, 3)))
        return b.emit("conv2d", x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)

    return step_of(emit)


@pytest.fixture
def packs(fake, space):
    """A family that reads its weight as (O, R, S, C)."""

    class Packs(fake):
        def __init__(self, twist, in_place=True):
            super().__init__(twist)
            self.in_place, self.fills, self.lay = in_place, 0, []

        def bind(self, parts, config, frame):
            room = Room((8, 3, 3, 4), torch.float32, torch.device("cpu"))
            weight = Constant(frame.values, "w", room, by_pixels, in_place=self.in_place)
            fill = weight.fill

            def counted():
                self.fills += 1
                fill()

            def launch(stream):
                w = frame.values["w"]
                self.lay.append((w.stride(), w.data_ptr() % ALIGNMENT_BYTES == 0))
                known = {**frame.values, "w": weight.tensor.permute(0, 3, 1, 2)}
                output(parts.step, frame).copy_(parts.step.evaluate(known)["conv2d"])
                self.twist(parts.step, frame)

            weight.fill = counted
            return Binding(launch, constants=(weight,))

    return Packs


CHANNELS_LAST, NCHW = (36, 1, 12, 4), (36, 9, 3, 1)


def test_weights_lie_in_channels_last_and_in_other_ways(graphs, convolution, packs, check_fake):
    family = packs(lambda step, frame: None)
    check_fake(convolution, family)
    assert set(family.lay) == {(CHANNELS_LAST, True), (NCHW, False)}
    assert family.lay[0] == (CHANNELS_LAST, True)
    # So they lie when the launch is captured, as they do when it is deployed.
    assert family.lay[-3:] == [(CHANNELS_LAST, True)] * 3
    assert family.fills == family.lay.count((NCHW, False))


def test_weights_are_filled_in_each_pass(graphs, convolution, packs, check_fake):
    family = packs(lambda step, frame: None, in_place=False)
    check_fake(convolution, family)
    assert family.fills == len(family.lay)


def test_a_weight_that_a_pass_does_not_fill(graphs, convolution, packs, check_fake, monkeypatch):
    monkeypatch.setattr(Constant, "fill", lambda self: self.memory.zero_())
    with pytest.raises(WrongResult, match="'conv2d'"):
        check_fake(convolution, packs(lambda step, frame: None, in_place=False))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("small_bytes", "counted"), [(8 * 9 * 4 * 4, True), (8 * 9 * 4 * 4 + 1, False)]
)
def test_what_is_packed_counts_where_it_is_more_than_the_launch(
    convolution, packs, space, monkeypatch, register, small_bytes, counted
):
    family = packs(lambda step, frame: None, in_place=False)
    monkeypatch.setattr("plantune.measure.step_alone.SMALL_BYTES", small_bytes)
    register(fake=family)
    timed = TimedStep(resolve(convolution, Candidate("fake", Attrs())), space.arch)
    assert family.fills == 1
    for _ in range(3):
        timed.launch()
    assert family.fills == (4 if counted else 1)


def test_a_weight_in_channels_last_costs_a_candidate_nothing(
    graphs, convolution, packs, space, monkeypatch, register
):
    """As load_model makes it, and as a plan is searched for."""
    family = packs(lambda step, frame: None)
    monkeypatch.setattr("plantune.measure.step_alone.SMALL_BYTES", 0)
    register(fake=family)
    TimedStep(resolve(convolution, Candidate("fake", Attrs())), space.arch).launch()
    assert (family.fills, family.lay) == (0, [(CHANNELS_LAST, True)])
