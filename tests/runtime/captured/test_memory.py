"""What a captured program reads and writes: its own memory, or the caller's where it lies."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from plantune.graph.extract import extract
from plantune.graph.types import TensorType
from plantune.planning import default_plan
from plantune.runtime.captured import program_on
from plantune.runtime.direct import DIRECT_AFTER
from plantune.runtime.program import Program
from plantune.space.search_space import load_search_space

from .conftest import CPU, SHAPE, expected, program_of, state_of


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
