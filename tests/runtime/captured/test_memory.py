"""What a captured program reads and writes: its own memory, or the caller's where it lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune.base.canonical import Attrs
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.captured.captured_program import program_on
from plantune.runtime.program.program import Program
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

    def test_another_layout_at_the_same_address(self, module, x, close):
        program = program_of(module)
        last = x.view(4, 8, 8, 3).permute(0, 3, 1, 2)
        for image in (x, last, x, last):
            (y,) = program.forward(image)
            close(y, expected(module, image))

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_cudnn_takes_its_best_algorithms(self, module, monkeypatch, deterministic):
        program, seen = program_of(module), set()
        program.plan = replace(program.plan, evidence=Attrs(deterministic=int(deterministic)))
        run = program._program.run_forward

        def watched():
            seen.add((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
            run()

        monkeypatch.setattr(program._program, "run_forward", watched)
        program.forward(torch.randn(SHAPE))
        assert (True, deterministic) in seen
        assert not torch.backends.cudnn.benchmark

    def test_without_elements_nothing_is_captured(self, module):
        graph = extract(module.eval(), TensorType((0, *SHAPE[1:])))
        space = load_search_space("cpu")
        program = program_on(
            CPU, check_plan(framework_plan(graph, space, network="none"), graph, space)
        )
        assert type(program) is Program


@pytest.mark.usefixtures("captures")
class TestWeights:
    """A pass computes what it needs from the weights' own memory."""

    def test_written_in_any_way(self, module, x, close):
        """Nobody tells the program of it."""
        program = program_of(module)
        for change in (
            lambda w: w.mul_(2),
            lambda w: w.data.mul_(-1),
            lambda w: w.untyped_storage().copy_(torch.randn_like(w).untyped_storage()),
        ):
            with torch.no_grad():
                change(module[0].weight)
            module[1].running_var.data.add_(0.5)
            (y,) = program.forward(x)
            close(y, expected(module, x))

    def test_replaced(self, module, x, captures, close):
        program = program_of(module)
        program.forward(x)
        module[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        program.refresh(state_of(module))
        (y,) = program.forward(x)
        close(y, expected(module, x))
        assert len(captures) == 2


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
