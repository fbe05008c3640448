"""`torch.compile(module, backend="plantune")`: as eager, in calls of every kind."""

from __future__ import annotations

import copy
import inspect
import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune import optimize
from plantune.backend import pieces

from .compiled import Net, assert_alike, compiled, gradients, image, ran, refused

ROOT = Path(__file__).resolve().parents[2]


class Interrupted(Net):
    """Prints, waits for a value, and goes another way by what it is."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv(x))
        print("after the convolution")
        mean = x.mean().item()
        x = torch.cat([x[:2], x[2:] * 2]) if mean > 0 else x - mean
        return self.head(x.mean((2, 3)))


def test_torch_finds_it_by_its_name():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["torch_dynamo_backends"] == {"plantune": "plantune.backend:plantune"}
    assert "plantune" in torch._dynamo.list_backends()


class TestInterrupted:
    # Dynamo itself asks an intermediate result for its gradient.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
    @pytest.mark.parametrize("offset", [1.0, -1.0], ids=["one way", "the other"])
    def test_it_is_cut_where_it_must_be(self, offset, capsys):
        module, x = Interrupted(), image().abs()
        with torch.no_grad():
            module.conv.weight += offset
        ours, theirs = compiled(copy.deepcopy(module)), module
        for _ in range(2):
            assert_alike(ours(x), theirs(x))
        assert_alike(gradients(ours, x), gradients(theirs, x))
        assert capsys.readouterr().out.count("after the convolution") == 6
        assert len(pieces()) == 3
        assert refused() == []
        assert ran()[1] == 0


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_its_problem_is_that_of_optimize(mode):
    module, x = Net().train(mode == "train"), image()
    tuned = optimize(module, x, mode=mode)
    with torch.set_grad_enabled(mode == "train"):
        tuned(x)
        compiled(module)(x)
    (piece,) = pieces()
    (other,) = piece._owners[0].tuned.values()
    problems = [[pool.plan.problem for pool in each.pools()] for each in (tuned, other)]
    assert [p.graph for p in problems[0]] == [p.graph for p in problems[1]]
    assert problems[1][0].network == "Net"
    assert piece.line.startswith(inspect.getfile(Net))


class TestSizes:
    def test_each_batch_has_its_plan_and_the_second_compiles_once_more(self):
        module = Net().eval()
        ours = compiled(module)
        with torch.no_grad():
            for batch in (2, 4, 5, 3, 4, 2):
                x = image(batch)
                assert_alike(ours(x), module(x))
        assert len(pieces()) == 2
        assert ran() == (6, 0)

    def test_a_size_that_the_graph_computes_with(self):
        module = nn.Linear(3, 4)
        module.forward = lambda x: F.linear(x, module.weight).view(x.shape[0] * 2, 2) / x.shape[0]
        ours = compiled(module, dynamic=True)
        for batch in (2, 6):
            x = torch.randn(batch, 3)
            assert_alike(ours(x), module(x))
        assert refused() == []


@pytest.mark.gpu
def test_on_a_gpu():
    """Sizes, training and weights that are written, each pass as captured graphs."""
    theirs = Net().cuda().to(memory_format=torch.channels_last)
    ours = copy.deepcopy(theirs)
    fast, steps = compiled(ours), [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for batch in (4, 8, 6, 4):
        x = image(batch).cuda()
        pairs = zip(gradients(fast, x), gradients(theirs, x), strict=True)
        for own, their in pairs:  # TF32 has 10 bits
            assert (own - their).norm() <= 1e-2 * their.norm() + 1e-3
        for step in steps:
            step.step()
        with torch.no_grad():
            own, their = fast.eval()(x), theirs.eval()(x)
        assert (own - their).norm() <= 1e-2 * their.norm() + 1e-3
        fast.train(), theirs.train()
    assert refused() == []
    assert ran() == (8, 0)


class TestTraining:
    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_steps_and_evaluation_between_them(self, optimizer):
        theirs = Net()
        ours = copy.deepcopy(theirs)
        fast = compiled(ours)
        steps = [optimizer(module.parameters(), lr=0.05) for module in (ours, theirs)]
        for _ in range(5):
            x = image(4)
            assert_alike(gradients(fast, x), gradients(theirs, x))
            for step in steps:
                step.step()
            fast.eval(), theirs.eval()
            with torch.no_grad():
                assert_alike(fast(x), theirs(x))
            fast.train(), theirs.train()
        assert_alike(ours.state_dict(), theirs.state_dict())
        assert ran() == (10, 0)

    def test_a_loss_and_what_is_logged_of_it(self):
        def step(module, x):
            loss = module(x).square().mean()
            return loss.detach().detach(), loss, loss.detach()

        theirs, x = Net(), image(4)
        ours = copy.deepcopy(theirs)
        logged, loss, _ = torch.compile(step, backend="plantune")(ours, x)
        exact = step(theirs, x)[1]
        assert_alike([logged, loss], [exact.detach(), exact])
        assert not logged.requires_grad
        assert logged.data_ptr() == loss.data_ptr()  # as eager's
        loss.backward(), exact.backward()
        assert_alike(ours.conv.weight.grad, theirs.conv.weight.grad)
        assert refused() == []
        assert ran() == (1, 0)

    def test_a_parameter_that_is_frozen_later(self):
        theirs = Net()
        ours = copy.deepcopy(theirs)
        fast, x = compiled(ours), image(4)
        for _ in range(2):
            gradients(fast, x), gradients(theirs, x)
            for module in (ours, theirs):
                module.conv.requires_grad_(False)
        assert ours.conv.weight.grad is None
        assert_alike(ours.head.weight.grad, theirs.head.weight.grad)
        assert refused() == []

    def test_the_gradient_of_an_input(self):
        module = Net().eval()
        fast = compiled(module)
        found = []
        for run in (fast, module):
            x = torch.ones(2, 3, 8, 8, requires_grad=True)
            run(x).sum().backward()
            found.append(x.grad)
        assert_alike(*found)
        assert refused() == []

    def test_what_needs_no_gradient_has_none(self):
        module = nn.Linear(3, 4)
        fast = compiled(lambda x: (module(x), module(x).detach() * 2, module(x).argmax(-1)))
        results = fast(torch.randn(2, 3))
        assert [result.requires_grad for result in results] == [True, False, False]
        assert refused() == []


class TestCalls:
    def test_arguments_and_results_of_every_kind(self):
        class Policy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()

            def forward(self, observation, *, mask, scale=1.0):
                logits = self.net(observation["image"]) * scale
                return {"logits": logits.masked_fill(mask, -1e9), "value": logits.sum(-1)}

        module = Policy().eval()
        fast = compiled(module)
        given = {"image": image()}
        mask = torch.tensor([[True, False], [False, False]])
        assert_alike(fast(given, mask=mask, scale=2), module(given, mask=mask, scale=2))
        assert refused() == []

    def test_state_that_the_module_moves(self):
        class Counting(Net):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))
                self.last = torch.zeros(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                self.calls.add_(1)
                self.last = super().forward(x) + self.last
                return self.last * self.calls

        theirs = Counting().eval()
        ours = copy.deepcopy(theirs)
        fast = compiled(ours)
        with torch.no_grad():
            for _ in range(3):
                x = image()
                assert_alike(fast(x), theirs(x))
        assert ours.calls == 3
        assert_alike(ours.last, theirs.last)
        assert refused() == []

    def test_state_with_names_that_a_module_has(self):
        class Named(Net):
            def __init__(self) -> None:
                super().__init__()
                self.add = nn.Linear(2, 2)
                self.add.register_buffer("module", torch.ones(2))
                self.register_buffer("count", torch.zeros(2))

            def forward(self, x: Tensor) -> Tensor:
                self.count.add_(1)
                return self.add(super().forward(x)) * self.add.module + self.count

        theirs = Named().eval()
        ours = copy.deepcopy(theirs)
        fast = compiled(ours)
        with torch.no_grad():
            for _ in range(2):
                x = image()
                assert_alike(fast(x), theirs(x))
        assert_alike(ours.count, theirs.count)
        assert refused() == []

    def test_weights_that_are_written_replaced_and_cast(self):
        module = Net().eval()
        fast, x = compiled(module), image()
        with torch.no_grad():
            fast(x)
            module.conv.weight.mul_(2)
            assert_alike(fast(x), module(x))
            module.head.weight.data = torch.randn(2, 4)
            assert_alike(fast(x), module(x))
            module.load_state_dict(Net().state_dict())
            assert_alike(fast(x), module(x))
            module.head.weight = nn.Parameter(torch.randn(2, 4))
            assert_alike(fast(x), module(x))
            module.double()
            assert_alike(fast(x.double()), module(x.double()))
        assert ran()[1] == 0

    def test_two_threads(self):
        module = Net().eval()
        fast, inputs = compiled(module), [image() for _ in range(8)]
        fast(inputs[0])
        found: dict[int, Tensor] = {}

        def run(which: range) -> None:
            for at in which:
                found[at] = fast(inputs[at])

        threads = [threading.Thread(target=run, args=(range(at, 8, 2),)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for at, x in enumerate(inputs):
            assert_alike(found[at], module(x))

    @pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
    @pytest.mark.parametrize("where", ["inside", "outside"])
    def test_autocast(self, where):
        module = Net().eval()

        def inside(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return module(x)

        fast = compiled(inside if where == "inside" else module)
        x = image()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=where == "outside"):
            ours = fast(x)
        torch.testing.assert_close(ours, inside(x), rtol=2e-2, atol=2e-2)
        assert ours.dtype == torch.bfloat16

    @pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
    def test_autocast_inside_while_weights_change(self):
        """Torch keeps casts of weights until autocast ends."""
        module = nn.Linear(3, 4)

        def inside(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return module(x)

        fast, x = compiled(inside), torch.randn(2, 3)
        for _ in range(3):
            weight, bias = module.weight.bfloat16(), module.bias.bfloat16()
            wanted = F.linear(x.bfloat16(), weight, bias)
            torch.testing.assert_close(fast(x), wanted, rtol=2e-2, atol=2e-2)
            with torch.no_grad():
                module.weight.neg_()
        assert ran() == (3, 0)

    @pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
    def test_a_part_without_gradients(self):
        module = nn.Linear(3, 3)

        def part(x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = module(x).abs() + 1
            return module(x) / scale

        fast, x = compiled(part), torch.randn(2, 3)
        for run in (fast, part, fast):
            module.zero_grad()
            run(x).sum().backward()
            found = module.weight.grad
            module.zero_grad()
            part(x).sum().backward()
            assert_alike(found, module.weight.grad)
        assert torch.is_grad_enabled()


class TestParameters:
    """One captured graph serves all modules of the same code."""

    def test_each_layer_has_its_own(self):
        layers = [nn.Linear(4, 4) for _ in range(3)]
        body = compiled(lambda layer, x: F.gelu(layer(x)))
        x = torch.randn(2, 4)
        for _ in range(2):
            for layer in layers:
                assert_alike(body(layer, x), F.gelu(layer(x)))
        assert len(pieces()) == 1
        assert ran() == (6, 0)

    def test_those_of_modules_that_are_gone_are_dropped(self):
        body, x = compiled(lambda layer, x: F.gelu(layer(x))), torch.randn(2, 4)
        for _ in range(4):
            layer = nn.Linear(4, 4)
            for _ in range(70):
                body(layer, x)
        (piece,) = pieces()
        assert len(piece._owners) == 2


@dataclass
class TrainerOutput:
    loss: Tensor
    logits: Tensor
