"""Gradients of a step: side by side, or left where a backward pass made them."""

from __future__ import annotations

import pytest
import torch

from plantune.training.device_update import CHUNK, chunks_of
from plantune.training.update import FlatGradients, unscale

CPU = torch.device("cpu")


@pytest.fixture
def weights():
    filters = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(tensor) for tensor in (torch.randn(5), filters, torch.randn(2, 3))]


@pytest.fixture
def gradients(weights):
    return FlatGradients(weights, CPU)


def of(weights):
    return [torch.randn_like(weight) for weight in weights]


def test_those_of_a_whole_batch_stay_where_they_are(weights, gradients):
    found = of(weights)
    with gradients.left_in_place():
        gradients.take(0, found)
        assert gradients.addresses() == [gradient.data_ptr() for gradient in found]
    assert gradients.addresses() == [view.data_ptr() for view in gradients.views]


def test_elsewhere_they_are_side_by_side(weights, gradients):
    found = of(weights)
    gradients.take(0, found)
    assert gradients.addresses() == [view.data_ptr() for view in gradients.views]
    assert all(map(torch.equal, gradients.views, found))


@pytest.mark.parametrize(
    "other",
    [
        lambda weight: torch.randn(4, 3, 3, 3),
        lambda weight: torch.randn(4, 3, 1, 1).expand(4, 3, 3, 3),
        lambda weight: weight.detach(),
    ],
    ids=["another order", "one element in many places", "the weight itself"],
)
def test_what_an_update_cannot_read_in_place_is_copied(weights, gradients, other):
    found = of(weights)
    found[1] = other(weights[1])
    with gradients.left_in_place():
        gradients.take(0, found)
        wanted = [gradient.data_ptr() for gradient in found]
        wanted[1] = gradients.views[1].data_ptr()
        assert gradients.addresses() == wanted
    assert torch.equal(gradients.views[1], found[1])


def test_parameters_without_one_have_no_address(weights, gradients):
    found = of(weights)
    with gradients.left_in_place():
        gradients.take(0, [found[0], None, found[2]])
        assert gradients.addresses() == [found[0].data_ptr(), 0, found[2].data_ptr()]
    assert gradients.present == [True, False, True]


@pytest.mark.parametrize("stay", [False, True])
def test_micro_batches_add_up_and_leave_what_they_were_given(weights, gradients, stay):
    parts = [of(weights) for _ in range(3)]
    parts[0][2] = None
    before = [None if each is None else each.clone() for each in parts[0]]
    with gradients.left_in_place() if stay else torch.no_grad():
        for number, part in enumerate(parts):
            gradients.take(number, part)
        assert gradients.addresses() == [view.data_ptr() for view in gradients.views]
    for at, view in enumerate(gradients.views):
        there = [part[at] for part in parts if part[at] is not None]
        assert torch.equal(view, sum(there[1:], there[0].clone()))
    for each, kept in zip(parts[0], before, strict=True):
        assert each is None or torch.equal(each, kept)


def test_chunks_cover_each_parameter_once():
    sizes = (5, CHUNK, 2 * CHUNK + 1, 0)
    weights = [torch.zeros(size, dtype=torch.float16) for size in sizes]
    weights.insert(2, torch.zeros(7))
    layout = FlatGradients(weights, CPU).layout
    found = chunks_of(weights, layout, torch.float16)
    assert [(c.item, c.first, c.count, c.chunks) for c in found] == [
        (0, 0, 5, 1),
        (1, 0, CHUNK, 1),
        (3, 0, CHUNK, 3),
        (3, CHUNK, CHUNK, 3),
        (3, 2 * CHUNK, 1, 3),
    ]
    slots = [*layout.slots.values()]
    for chunk in found:
        assert chunk.parameter == weights[chunk.item].data_ptr() + 2 * chunk.first
        assert chunk.start == slots[chunk.item].start + chunk.first
    assert [c.item for c in chunks_of(weights, layout, torch.float32)] == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [0.0, float("inf"), float("nan")])
def test_unscaling_finds_what_is_not_finite_in_any_dtype(monkeypatch, dtype, wrong):
    """torch's own takes no bfloat16 on a GPU."""
    own = torch._amp_foreach_non_finite_check_and_unscale_

    def checked(buffers, *others):
        assert all(buffer.dtype != torch.bfloat16 for buffer in buffers)
        own(buffers, *others)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", checked)
    buffers = [torch.full((3,), 8.0), torch.full((4,), 8.0, dtype=dtype)]
    buffers[1][2] += wrong
    found = torch.zeros(1)
    unscale(buffers, found, torch.tensor([0.25]))
    assert float(found) == (wrong != 0)
    assert buffers[0].tolist() == [2, 2, 2]
    assert buffers[1][:2].tolist() == [2, 2]
