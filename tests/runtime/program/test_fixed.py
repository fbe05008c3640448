"""What follows from no tensor at all is made once for a program."""

from __future__ import annotations

import torch
from torch import nn

from plantune.graph.ops.overload import OverloadOp
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.program.program import Program


class Masked(nn.Module):
    """What it makes of shapes alone is neither of weights nor of images."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        mask = x.new_zeros(5, 6)
        mask[1:, :3] = torch.arange(3, dtype=x.dtype)
        return x * self.scale + mask.masked_fill(mask == 1, -2.0)


def test_what_never_changes_is_made_once(space, monkeypatch):
    module, x = Masked(), torch.randn(5, 6)
    graph = extract(module, TensorType((5, 6)))
    fixed = {node.op for node in graph.nodes if node.name in graph.fixed}
    assert {"aten.full.default", "aten.arange.default"} <= fixed
    ran: list[str] = []
    plain = OverloadOp.evaluate_loosely

    def spy(op, inputs, attrs, loose):
        ran.append(op.name)
        return plain(op, inputs, attrs, loose)

    monkeypatch.setattr(OverloadOp, "evaluate_loosely", spy)
    program = Program(check_plan(framework_plan(graph, space, network="masked"), graph, space))
    program.refresh(module.state_dict())
    assert fixed & set(ran)
    for _ in range(2):
        with torch.no_grad():
            module.scale.normal_()
        ran.clear()
        program.refresh(module.state_dict())
        (y,) = program.forward(x)
        torch.testing.assert_close(y, module(x))
        assert not fixed & set(ran)


class Parts(nn.Module):
    """Returns what follows from no input: a fixed tensor, and a part of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(4))

    def forward(self, x):
        return x * 2.0, x.new_zeros(3), self.table[1:], self.table.exp()


def test_results_without_an_input_are_there_in_each_pass(space):
    module, x = Parts(), torch.randn(2)
    graph = extract(module, TensorType((2,)))
    program = Program(check_plan(framework_plan(graph, space, network="parts"), graph, space))
    program.refresh(module.state_dict())
    for _ in range(3):
        outputs = program.forward(x)
        torch.testing.assert_close(outputs, module(x))
        for output in outputs:  # which are the caller's to change
            output.fill_(7.0)
