"""What a captured program does around its graphs, with graphs that are calls of this process."""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.errors import CaptureError
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.types import TensorType
from plantune.planning import default_plan
from plantune.runtime import pool, recorder
from plantune.runtime.captured import CapturedProgram, program_on
from plantune.runtime.direct import DIRECT_AFTER
from plantune.runtime.form import Form
from plantune.runtime.live_state import HeldTensors, LiveState
from plantune.runtime.module import UnplannedCall
from plantune.runtime.program import Program
from plantune.runtime.recorder import Recorder
from plantune.space.search_space import load_search_space

CPU = torch.device("cpu")
SHAPE = (4, 3, 8, 8)


class Stream:
    """Remembers which one is current."""

    current: Stream

    def __init__(self, device=None) -> None:
        self.waited: list[Stream] = []
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Recorded:
    """A graph: `captures` says what a replay does."""

    def replay(self) -> None:
        raise AssertionError("nothing was captured")


def replay_of(program, run):
    """Runs on the memory of the capture, as a graph does, whatever a program has there now."""
    values, graph = program._program.values, program.graph
    given = (*graph.inputs, *graph.output_gradients, *graph.parameters, *graph.buffers)
    sources = [name for name, _ in given if name in values]
    read = {name: values[name] for name in sources}
    written = {name: values[name] for name in graph.results if name in values}

    def replay():
        now = {name: values[name] for name in sources}
        values.update(read)
        run()
        for name, tensor in written.items():
            if values[name] is not tensor:
                tensor.copy_(values[name])
        values.update(now)

    return replay


@pytest.fixture
def captures(monkeypatch):
    """What was captured so far; an error in `.failure` breaks the next capture behind its pass, one
    in `.later` that behind the next.
    """

    class Captures(list):
        failure: BaseException | None = None
        later: BaseException | None = None

    made = Captures()
    Stream.current = Stream()
    for name, value in {
        "Stream": Stream,
        "CUDAGraph": Recorded,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device=None: Stream.current,
        "set_stream": lambda stream: setattr(Stream, "current", stream),
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: nullcontext(),
        "graph": lambda graph, **_: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(recorder, "stream_for", lambda owner, device: Stream())

    def capture(self, graph, run, current):
        # As torch does where a capture breaks: it stays on its stream.
        Stream.current = self._side
        for _ in range(recorder.WARM_UP_PASSES + 1):
            run()
        if made.failure is not None:
            raise made.failure
        made.failure, made.later = made.later, None
        Stream.current = current
        made.append(run)

    def captured(self, name, run):
        found = make_pass(self, name, run)
        found.graph.replay = replay_of(self, run)
        return found

    make_pass = CapturedProgram._captured
    monkeypatch.setattr(CapturedProgram, "_captured", captured)
    monkeypatch.setattr(Recorder, "_capture", capture)
    return made


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


@pytest.fixture
def module():
    return Normed()


def program_of(module, train=False):
    module.train(train)
    graph = extract(module, TensorType(SHAPE), fold=False if train else None)
    if train:
        graph = differentiate(graph, [name for name, _ in module.named_parameters()])
    space = load_search_space("cpu")
    program = CapturedProgram(graph, default_plan(graph, space, network="normed"), space, CPU)
    program.refresh(state_of(module))
    return program


def state_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def expected(module, x):
    return copy.deepcopy(module)(x)


@pytest.fixture
def x():
    return torch.randn(SHAPE)


@pytest.mark.usefixtures("captures")
class TestInputs:
    def test_each_pass_reads_what_it_is_given(self, module, close):
        program = program_of(module)
        for _ in range(3):
            x = torch.randn(SHAPE)
            (y,) = program.forward(x)
            close(y, expected(module, x))

    def test_a_result_is_the_callers(self, module, x, close):
        program = program_of(module)
        (first,) = program.forward(x)
        kept = first.clone()
        program.forward(x + 1)
        assert torch.equal(first, kept)

    def test_from_some_repetition_on_it_is_read_where_it_lies(self, module, x, captures, close):
        """F45: what is read there is what is there in that call."""
        program = program_of(module)
        for _ in range(DIRECT_AFTER + 5):
            x.normal_()
            (y,) = program.forward(x)
            close(y, expected(module, x))
        before = len(captures)
        other = torch.randn(SHAPE)
        (y,) = program.forward(other)
        close(y, expected(module, other))
        (y,) = program.forward(x)
        close(y, expected(module, x))
        assert len(captures) == before

    def test_another_layout_at_the_same_address(self, module, x, close):
        program = program_of(module)
        last = x.view(4, 8, 8, 3).permute(0, 3, 1, 2)
        for image in (x, last, x, last):
            for _ in range(DIRECT_AFTER + 2):
                (y,) = program.forward(image)
            close(y, expected(module, image))

    @pytest.mark.parametrize("failure", [RuntimeError("no"), torch.OutOfMemoryError("no")])
    def test_a_capture_there_that_breaks_leaves_the_other(
        self, module, x, captures, close, failure
    ):
        program = program_of(module)
        for _ in range(DIRECT_AFTER):
            program.forward(x)
        captures.failure = failure
        for image in (x, torch.randn(SHAPE), x):
            (y,) = program.forward(image)
            close(y, expected(module, image))

    def test_without_elements_nothing_is_captured(self, module):
        graph = extract(module.eval(), TensorType((0, *SHAPE[1:])))
        space = load_search_space("cpu")
        program = program_on(CPU, graph, default_plan(graph, space, network="none"), space)
        assert type(program) is Program


@pytest.fixture
def outputs_in(monkeypatch):
    """Lets calls get memory for their outputs from a list, in turns."""

    def put(program, *memory):
        monkeypatch.setattr(program, "_new_outputs", [itertools.cycle(memory).__next__])

    return put


@pytest.mark.usefixtures("captures")
class TestOutputs:
    """Memory for them is the caller's; a graph writes there if it comes again and again."""

    def test_in_turns(self, module, x, close, outputs_in):
        program = program_of(module)
        outputs_in(program, *torch.full((2, 4, 8, 6, 6), torch.nan))
        before = None
        for _ in range(4 * DIRECT_AFTER):
            x.normal_()
            (y,) = program.forward(x)
            close(y, expected(module, x))
            assert before is None or torch.equal(*before)
            before = y, y.clone()
        assert not program.launch(x).results  # written already, not to be copied

    def test_each_time_another(self, module, x, captures, close):
        program, kept = program_of(module), []
        for _ in range(3 * DIRECT_AFTER):
            x.normal_()
            kept.append((*program.forward(x), expected(module, x)))
        for y, wanted in kept:
            close(y, wanted)
        graphs = [run for run in captures if run.__name__ == "run"]
        assert len(graphs) == 1  # which reads the input where it lies

    def test_beside_another_input(self, module, close, outputs_in):
        """A graph is for the addresses of both."""
        program = program_of(module)
        outputs_in(program, torch.full((4, 8, 6, 6), torch.nan))
        images = [torch.randn(SHAPE) for _ in range(3)]
        for x in images * (2 * DIRECT_AFTER):
            (y,) = program.forward(x)
            close(y, expected(module, x))

    def test_with_other_weights(self, x, close, outputs_in):
        """Graphs read weights where they lie."""
        module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        program = program_of(module)
        outputs_in(program, torch.full((4, 8, 6, 6), torch.nan))
        for _ in range(2):
            for _ in range(2 * DIRECT_AFTER):
                (y,) = program.forward(x)
            close(y, expected(module, x))
            module[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
            program.refresh(state_of(module))

    def test_a_capture_that_breaks_is_not_tried_in_each_call(self, module, x, captures, outputs_in):
        program, tried = program_of(module), []
        outputs_in(program, torch.full((4, 8, 6, 6), torch.nan))
        program.forward(x)
        captures.failure = RuntimeError("no")
        captured_at = program._captured_at
        program._captured_at = lambda *a: tried.append(a) or captured_at(*a)
        for _ in range(4 * DIRECT_AFTER):
            program.forward(x)
        assert len(tried) == 1


@pytest.mark.usefixtures("captures")
def test_training_follows_eager_from_the_first_pass(close):
    """Both passes are captured in it, and the backward pass may take the memory of outputs."""
    first, second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False)
    blocks = (first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(8), nn.ReLU())
    module = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 5))
    other = copy.deepcopy(module)
    program = program_of(module, train=True)
    for _ in range(3):
        x, dy = torch.randn(SHAPE), torch.randn(4, 5)
        (y,) = program.forward(x)
        gradients = program.backward(dy)
        wanted = other(x)
        close(y, wanted)
        other.zero_grad()
        wanted.backward(dy)
        for name, parameter in other.named_parameters():
            close(gradients[name], parameter.grad)
    for ours, theirs in zip(module.buffers(), other.buffers(), strict=True):
        close(ours, theirs)


def test_passes_of_training_are_captured_once(module, x, captures):
    program = program_of(module, train=True)
    for _ in range(3):
        program.forward(x)
        program.backward(torch.ones(4, 8, 6, 6))
    assert len(captures) == 2


def test_in_a_capture_of_the_callers_nothing_is_captured(module, x, captures, monkeypatch):
    program = program_of(module, train=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    program.forward(x)
    assert not captures


@pytest.mark.usefixtures("captures")
@torch.no_grad()
def test_memory_that_another_weight_got_is_that_weights(module, x, close):
    program, weight = program_of(module), module[0].weight
    weight.data = torch.randn_like(weight)
    # As if the other one's storage had been resized to nothing, and this one had got its memory.
    state, names = state_of(module), (*program.graph.parameters, *program.graph.buffers)
    program._addresses = [state[name].data_ptr() for name, _ in names]
    program.refresh(state)
    (y,) = program.forward(x)
    close(y, expected(module, x))


FAILURES = {
    "refused": (RuntimeError("operation not permitted when stream is capturing"), CaptureError),
    "no memory": (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt),
}


class TestFailures:
    """F46: a capture that breaks changes nothing, and the next one works."""

    @pytest.mark.parametrize("name", FAILURES)
    def test_in_training(self, module, x, captures, close, name):
        failure, raised = FAILURES[name]
        program, stream = program_of(module, train=True), Stream.current
        before = {name: value.clone() for name, value in module.named_buffers()}
        captures.failure = failure
        with pytest.raises(raised):
            program.forward(x)
        assert Stream.current is stream
        for buffer, value in module.named_buffers():
            assert torch.equal(value, before[buffer]), buffer
        assert not recorder._one_capture.locked()

        captures.failure = None
        other = copy.deepcopy(module)
        (y,) = program.forward(x)
        close(y, other(x))
        for (buffer, ours), theirs in zip(module.named_buffers(), other.buffers(), strict=True):
            close(ours, theirs)
            assert not torch.equal(ours, before[buffer])

    @pytest.mark.parametrize("name", FAILURES)
    def test_of_the_backward_pass_in_the_first_forward(self, module, x, captures, close, name):
        """F35: there the framework can still run both."""
        failure, raised = FAILURES[name]
        program = program_of(module, train=True)
        before = {name: value.clone() for name, value in module.named_buffers()}
        captures.later = failure
        with pytest.raises(raised):
            program.forward(x)
        for buffer, value in module.named_buffers():
            assert torch.equal(value, before[buffer]), buffer

        captures.failure = None
        other = copy.deepcopy(module)
        (y,) = program.forward(x)
        close(y, other(x))
        for (_, ours), theirs in zip(module.named_buffers(), other.buffers(), strict=True):
            close(ours, theirs)

    @pytest.mark.usefixtures("launches")
    def test_a_module_without_room_for_its_backward_pass(self, module, x, captures, close):
        """F35."""
        tuned = optimize(module.train(), x, mode="train")
        other = copy.deepcopy(module)
        captures.later = FAILURES["no memory"][0]
        with pytest.warns(UnplannedCall, match="out of memory"):
            y = tuned(x)
        wanted = other(x)
        close(y, wanted)
        y.sum().backward()
        wanted.sum().backward()
        for ours, theirs in zip(tuned.parameters(), other.parameters(), strict=True):
            close(ours.grad, theirs.grad)
        for ours, theirs in zip(tuned.buffers(), other.buffers(), strict=True):
            close(ours, theirs)

    def test_in_the_preparation(self, module, x, captures, close):
        program = program_of(module)
        with torch.no_grad():
            module[0].weight = nn.Parameter(module[0].weight * 2)
        captures.failure = RuntimeError("no")
        with pytest.raises(CaptureError, match="the refresh pass: no"):
            program.refresh(state_of(module))
        captures.failure = None
        program.refresh(state_of(module))
        (y,) = program.forward(x)
        close(y, expected(module, x))

    @pytest.mark.usefixtures("captures")
    def test_where_all_graphs_are_gone_they_get_other_memory(self, module, x, monkeypatch):
        first, graph = [], Recorder.graph

        def noted(self, run, **known):
            first.append(known["first"])
            return graph(self, run, **known)

        monkeypatch.setattr(Recorder, "graph", noted)
        program = program_of(module)
        program.forward(x)
        module[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        program.refresh(state_of(module))
        assert first == [True, False, True]

    def test_a_capture_after_a_broken_one_is_behind_its_work(self, module, x, captures):
        program, stream = program_of(module), Stream.current
        captures.failure = RuntimeError("no")
        with pytest.raises(CaptureError):
            program.forward(x)
        assert stream.waited[-1] is program._recorder._side


@pytest.fixture
def launches(captures, monkeypatch):
    """One entry for each forward pass that a tuned module starts."""
    monkeypatch.setattr(pool, "program_on", captured_on)
    started = []
    launch = CapturedProgram.launch

    def launch_and_note(self, *inputs):
        started.append(inputs)
        return launch(self, *inputs)

    monkeypatch.setattr(CapturedProgram, "launch", launch_and_note)
    return started


def captured_on(device, graph, plan, space):
    return CapturedProgram(graph, plan, space, device)


@contextmanager
def suppressed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnplannedCall)
        yield


@pytest.fixture
def calm(module, x, launches):
    """A tuned module behind a call in which nothing had changed."""
    tuned = optimize(module.eval(), x)
    tuned(x)
    tuned(x)
    launches.clear()
    return tuned


class TestAhead:
    """A pass starts before the host looks at what may have changed, and counts if nothing has."""

    def test_a_call_is_one_pass(self, calm, x, launches, close):
        for _ in range(3):
            x.normal_()
            close(calm(x), expected(calm.reference, x))
        assert len(launches) == 3

    def test_it_is_started_before_anything_is_looked_at(self, calm, x, launches, monkeypatch):
        seen = []
        changed = Form.changed
        monkeypatch.setattr(
            Form,
            "changed",
            lambda self, *known: seen.append(len(launches)) or changed(self, *known),
        )
        calm(x)
        assert seen == [1]

    @torch.no_grad()
    def test_with_other_weights_it_is_run_again(self, calm, x, launches, close):
        calm.get_submodule("0").weight.mul_(2)
        close(calm(x), expected(calm.reference, x))
        assert len(launches) == 2

    @torch.no_grad()
    def test_weights_that_change_all_the_time_cost_no_second_pass(self, calm, x, launches, close):
        for _ in range(4):
            calm.get_submodule("0").weight.mul_(1.1)
            close(calm(x), expected(calm.reference, x))
        assert len(launches) == 5

    @torch.no_grad()
    def test_an_interrupt_in_the_look_loses_no_change(self, calm, x, close, monkeypatch):
        """The look has noted the change by then."""
        changed = LiveState.changed

        def interrupted(self):
            monkeypatch.setattr(LiveState, "changed", changed)
            assert changed(self)
            raise KeyboardInterrupt

        calm.get_submodule("0").weight.mul_(2)
        monkeypatch.setattr(LiveState, "changed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calm(x)
        close(calm(x), expected(calm.reference, x))

    def test_another_layer_is_run(self, calm, x, close):
        calm.get_submodule("0").stride = (2, 2)
        close(calm(x), expected(calm.reference, x))
        assert calm(x).shape == (4, 8, 3, 3)

    def test_replaced_weights_are_used(self, calm, x, close):
        calm.get_submodule("0").weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        close(calm(x), expected(calm.reference, x))

    def test_hooks_stop_it(self, calm, x, close):
        calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
        with pytest.warns(UnplannedCall, match="hooks"):
            close(calm(x), calm.reference(x))

    def test_determinism_that_is_asked_for_stops_it(self, calm, x, close):
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.warns(UnplannedCall, match="deterministic"):
                close(calm(x), calm.reference(x))
        finally:
            torch.use_deterministic_algorithms(False)

    def test_a_pass_that_does_not_count_holds_no_memory(self, calm, x, monkeypatch):
        held, launch, eagerly = [], CapturedProgram.launch, calm.reference.forward

        def launch_and_note(self, *inputs):
            started = launch(self, *inputs)
            held.extend(map(weakref.ref, started.outputs))
            return started

        def alive_in_forward(x):
            held[:] = [output() for output in held]
            return eagerly(x)

        monkeypatch.setattr(CapturedProgram, "launch", launch_and_note)
        monkeypatch.setattr(calm.reference, "forward", alive_in_forward)
        calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
        with suppressed():
            calm(x)
        assert held == [None]

    def test_what_the_framework_runs_is_not_started_again(self, calm, x, launches):
        calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
        with pytest.warns(UnplannedCall, match="hooks"):
            calm(x)
        calm(x)
        assert len(launches) == 1

    @pytest.mark.parametrize("first", [False, True])
    def test_no_graph_is_captured_under_autocast(self, calm, x, captures, first):
        """It would be replayed without it, too: whichever call is the one that repeats enough."""
        under = []
        captures.append = lambda run: under.append(torch.is_autocast_enabled("cpu"))
        for call in range(3 * DIRECT_AFTER):
            with torch.autocast("cpu", enabled=(call % 2 == 0) is first), suppressed():
                calm(x)
        assert under
        assert not any(under)

    def test_transforms_of_functions_run_in_the_framework(self, calm, x, close):
        calm.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
        with pytest.warns(UnplannedCall, match="hooks"):
            y = torch.func.vmap(calm)(torch.stack([x, x + 1]))
        close(y[1], calm.reference(x + 1))

    def test_where_weights_lie_is_looked_at_once_a_call(self, calm, x, monkeypatch):
        looks, in_place = [], HeldTensors.in_place
        monkeypatch.setattr(
            HeldTensors, "in_place", lambda self: looks.append(self) or in_place(self)
        )
        for _ in range(3):
            calm(x)
        assert len(looks) == 3

    def test_what_is_known_of_other_tensors_does_not_count(self, calm, x, close):
        """Another thread's call may end with a pool of an earlier form."""
        earlier = calm._last_pool
        calm.reference[0] = nn.Conv2d(3, 8, 3)
        calm(x)
        calm._last_pool = earlier
        weight = calm.get_submodule("0").weight
        weight.data = weight.data.clone() * 3
        close(calm(x), expected(calm.reference, x))

    def test_a_call_that_ends_late_brings_no_earlier_pool_back(self, calm, x, monkeypatch):
        earlier, forward = calm._last_pool, pool.Instance.forward

        def change_meanwhile(self, *inputs):
            monkeypatch.setattr(pool.Instance, "forward", forward)
            calm.reference[0] = nn.Conv2d(3, 8, 3)
            calm(x)
            return forward(self, *inputs)

        calm._last_pool = None
        monkeypatch.setattr(pool.Instance, "forward", change_meanwhile)
        calm(x)
        assert calm._last_pool is not earlier

    def test_where_another_thread_saw_weights_move_nothing_starts(self, calm, x, launches, close):
        """Its look says where they lie now; graphs of this instance read where they lay."""
        weight = calm.get_submodule("0").weight
        weight.data = weight.data.clone() * 3
        calm._last_form.tensors.look()
        close(calm(x), expected(calm.reference, x))
        assert len(launches) == 1

    @torch.no_grad()
    def test_memory_that_a_storage_lost_is_not_read(self, calm, x, launches, close):
        weight = calm.get_submodule("0").weight
        kept = weight.clone()
        size = weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        others = [torch.empty(size, dtype=torch.uint8) for _ in range(8)]  # one takes that memory
        weight.untyped_storage().resize_(size)
        weight.copy_(kept)
        close(calm(x), expected(calm.reference, x))
        assert len(others) == 8
        assert len(launches) == 1

    def test_a_plan_that_runs_eagerly_starts_nothing(self, calm, x, launches):
        calm.train()
        object.__setattr__(calm.pool().plan, "runner", "eager")
        for _ in range(3):
            calm(x)
        assert len(launches) <= 1

    def test_another_batch_is_not_started(self, calm, x, launches):
        with pytest.warns(UnplannedCall):
            calm(x[:2])
        assert not launches

    def test_a_refresh_by_hand_counts(self, calm, x, launches, close):
        with torch.no_grad():
            calm.get_submodule("0").weight.data.view(-1)[1] += 1
        calm.refresh()
        close(calm(x), expected(calm.reference, x))
        assert len(launches) == 2

    def test_every_instance_goes_back(self, calm, x, launches):
        for scale in (1.0, 2.0):
            with torch.no_grad():
                calm.get_submodule("0").weight.mul_(scale)
            calm(x)
        assert len(calm.pool()._idle) == 1
