"""Runs networks from plans beside eager: the same values, in the same places of memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune import Plan, optimize
from plantune.devices.machine import environment_of
from plantune.graph.fusions import all_fusions
from plantune.graph.graph import Graph
from plantune.graph.layouts import same_places
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import Preference, compose
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls import choose
from plantune.space.search_space import SearchSpace

from .random_modules import drawn

NHWC = torch.channels_last
IMAGES: dict[str, Any] = {
    "in rows": lambda x: x.contiguous(),
    "in channels_last": lambda x: x.contiguous(memory_format=NHWC),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "cut out": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
}
PREFERENCES = {
    "rows": (Preference("view"), Preference("framework", {"layout": "nchw"})),
    "channels_last": (
        Preference("gemm", {"layout": "nhwc"}),
        Preference("onednn_conv", {"layout": "nhwc", "prepack": True}),
        Preference("view"),
        Preference("framework", {"layout": "nhwc"}),
    ),
}
Tensors = Mapping[str, Tensor | None]


def plan_everything(monkeypatch: pytest.MonkeyPatch, kind: str, route: str = PROGRAM) -> None:
    """Whatever graph a call has, it runs from a plan, or by the route of the framework's that this
    names. It is taken as it is: what comes of it is compared here.
    """

    def guess(graph: Graph, space: SearchSpace, *, network: str) -> Plan:
        preferences, fusions = PREFERENCES[kind], all_fusions()
        plan = compose(graph, space, network=network, fusions=fusions, preferences=preferences)
        remember_proof(plan, environment_of(torch.device("cpu")))
        return replace(plan, route=route)

    monkeypatch.setattr(choose, "guessed_plan", guess)
    monkeypatch.setattr(choose, "is_unsure", lambda graph, plan: False)


def wanted(result: Tensor, others: Sequence[Tensor]) -> tuple[int, ...]:
    """Eager's strides; in rows what overlaps, or has gaps where other tensors are."""
    reach, gaps = 1, False
    for stride, size in sorted(zip(result.stride(), result.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return torch.empty(result.shape, device="meta").stride()
            gaps |= stride > reach
            reach += stride * (size - 1)
    storages = [other.untyped_storage().data_ptr() for other in others]
    shared = storages.count(result.untyped_storage().data_ptr()) > 1
    return torch.empty(result.shape, device="meta").stride() if gaps and shared else result.stride()


def assert_stored_alike(
    found: Sequence[Tensor], eager: Sequence[Tensor], given: Sequence[Tensor]
) -> None:
    """Results of a call, beside eager's for what was `given`, weights among that."""
    assert len(found) == len(eager)
    for at, (one, other) in enumerate(zip(found, eager, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.stride() == wanted(other, [*eager, *given]), f"result {at}"


def assert_near(found: Tensors, eager: Tensors, exact: Tensors) -> None:
    """Norms of few numbers that are nearly the same magnify errors, eager's too."""
    assert found.keys() == eager.keys()
    for name, tensor in eager.items():
        ours, right = found[name], exact[name]
        assert (ours is None) == (tensor is None), name
        if ours is not None and tensor is not None and right is not None:
            own = (tensor.double() - right).abs().max().item()
            most = 8 * own + 1e-3 * max(right.abs().max().item(), 1.0)
            assert (ours.double() - right).abs().max().item() <= most, name


def _passes(module: nn.Module, x: Tensor, trains: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """The results, and everything by name: the gradients too, if it trains."""
    module.zero_grad()
    source = x.detach().requires_grad_(trains)
    with torch.set_grad_enabled(trains):
        made = module(source)
    named: dict[str, Any] = {f"result {at}": y.detach() for at, y in enumerate(made)}
    if trains:
        draw = torch.Generator().manual_seed(1)
        seeds = [torch.randn(y.shape, generator=draw).to(y.device, y.dtype) for y in made]
        torch.autograd.backward(made, seeds)
        named |= {"x": source.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return [*made], named


def run_beside_eager(seed: int, device: str = "cpu", how: str | None = "planned") -> None:
    """A network of that seed, called with images that are stored in different ways; `how` is what
    must run each call, if that is known.
    """
    module, x = drawn(seed)
    pick = random.Random(seed)
    mode = pick.choice(("infer", "train"))
    module.train(mode == "train").to(device)
    exact = copy.deepcopy(module).double()
    if pick.random() < 0.5:
        module.to(memory_format=NHWC)  # type: ignore[call-overload]
    x = x.to(device)
    example = IMAGES[pick.choice(("in rows", "in channels_last"))](x)
    tuned, twin = optimize(module, example, mode=mode), copy.deepcopy(module)
    for name in pick.sample([*IMAGES], 3):
        for trains in {False, mode == "train"}:
            image = IMAGES[name](x)
            found, ours = _passes(tuned, image, trains)
            assert how is None or tuned.last_call().how == how
            eager, theirs = _passes(twin, image, trains)
            assert_stored_alike(found, eager, [image, *twin.parameters()])
            assert_near(ours, theirs, _passes(exact, image.double(), trains)[1])
            _assert_gradients_stored_alike(ours, theirs)


def _assert_gradients_stored_alike(found: Tensors, eager: Tensors) -> None:
    for name, gradient in eager.items():
        ours = found[name]
        if ours is not None and gradient is not None and not name.startswith("result"):
            assert same_places(ours, gradient.stride()), name
            assert ours.is_contiguous() == gradient.is_contiguous(), name
