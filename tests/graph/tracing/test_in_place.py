"""In-place ops: the graph has the values that eager leaves behind, or the module is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.errors import UnsupportedModule
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType

LINEAR = {"linear": lambda: nn.Linear(4, 4)}


def old_name(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.relu_()
    return y


def old_and_new_name(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    z = y.mul_(2.0)
    return y + z, y, z


def value_before(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    before = y * 3.0
    y.add_(1.0)
    return before, y


def aliases(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    same = m.identity(y.contiguous())
    y.sigmoid_()
    return same


def residual(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    identity = y
    out = m.linear(torch.relu(y))
    out += identity
    return m.relu(out), identity


def augmented(m: Any, x: Tensor) -> Any:
    y = z = m.linear(x)
    y += 1.0
    y -= x
    y *= 2.0
    y /= 4.0
    return z


def functional(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    F.relu(y, inplace=True)
    z = m.linear(x)
    F.relu(z, True)
    w = m.linear(x)
    torch.relu_(w)
    v = m.linear(x)
    F.relu(v, inplace=False)
    return y, z, w, v


def module_in_place(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    m.relu(y)
    return y


def twice(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.add_(-0.5)
    z = y
    y.relu_()
    return y * 2.0, z


def view_used_before_only(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    total = y.view(-1).sum(0)
    y.relu_()
    return y + total


def view_made_after(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.relu_()
    return y.view(-1), m.flatten(y)


def view_of_view_alone(m: Any, x: Tensor) -> Any:
    return m.linear(x).view(-1).view(4, 2).relu_()


def by_a_view_of_itself(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.add_(y.view(8).view(2, 4))
    return y


def dropout_in_place(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    return m.drop(y) + y


def transposed(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    t = y.transpose(0, 1).t()
    t *= 2.0
    return y


def copy_of_the_input(m: Any, x: Tensor) -> Any:
    y = x.clone()
    y.add_(1.0)
    return x, y


def contiguous_copy(m: Any, x: Tensor) -> Any:
    y = m.linear(x).t()
    z = y.contiguous()
    z.mul_(2.0)
    return y, z


def cast_copy(m: Any, x: Tensor) -> Any:
    y = x.to(x.dtype, copy=True)
    y.relu_()
    return x, y


def what_dropout_gives_back(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    z = F.dropout(y, training=False)
    z.mul_(2.0)
    return y, z


def view_then_base(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    view = y.view(-1)
    y.relu_()
    return view


def base_then_view(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.view(-1).add_(1.0)
    return y


def unsqueezed(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    F.relu_(torch.unsqueeze(y, 0))
    return y


def parts_of_a_mask(m: Any, x: Tensor) -> Any:
    """As Swin numbers its windows, with a view from before that sees it."""
    mask = x.new_zeros((4, 6))
    before = mask.view(2, 2, 6)[:, 1]
    for row in range(2):
        for column in range(3):
            mask[2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = row + 2 * column
    return x[:, :1] * mask.view(2, 2, 6).transpose(0, 1)[1, :, ::2], before


def rows_and_columns(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    column, row = y[:, 2], y[-1]
    row.mul_(3.0)
    y.t()[0].add_(column)
    y[:, 1:3].unsqueeze(0)[0, 1:].squeeze(0).relu_()
    return y, column, row


def views_of_a_view(m: Any, x: Tensor) -> Any:
    """The one between them is not read again."""
    y = m.linear(x)
    low = y[:1][:, 1:]
    y.add_(1.0)
    low[0].mul_(2.0)
    return low, y


KEPT = [
    view_then_base,
    base_then_view,
    unsqueezed,
    parts_of_a_mask,
    rows_and_columns,
    views_of_a_view,
    what_dropout_gives_back,
    transposed,
    copy_of_the_input,
    contiguous_copy,
    cast_copy,
    old_name,
    old_and_new_name,
    value_before,
    aliases,
    residual,
    augmented,
    functional,
    module_in_place,
    twice,
    view_used_before_only,
    view_made_after,
    view_of_view_alone,
    by_a_view_of_itself,
    dropout_in_place,
]


def parts() -> dict[str, nn.Module]:
    return {
        "linear": nn.Linear(4, 4),
        "relu": nn.ReLU(inplace=True),
        "identity": nn.Identity(),
        "flatten": nn.Flatten(0),
        "unfold": nn.Flatten(0),  # a name that no method has
        "drop": nn.Dropout(inplace=True),
    }


@pytest.mark.parametrize("forward", KEPT)
def test_means_what_eager_does(forward: Any, calls: Any, randomise: Any, extracts: Any) -> None:
    module = randomise(calls(forward, **parts())).eval()
    extracts(module, torch.randn(2, 4, dtype=torch.float64))


def flattened(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    m.relu(m.unfold(y))
    return y


def piece_of_a_split(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    y.chunk(2)[0].relu_()
    return y


def input_itself(m: Any, x: Tensor) -> Any:
    return x.relu_()


def input_through_a_view(m: Any, x: Tensor) -> Any:
    return x.view(-1).relu_()


def input_augmented(m: Any, x: Tensor) -> Any:
    x += 1.0
    return x


def parameter(m: Any, x: Tensor) -> Any:
    m.linear.weight.mul_(0.5)
    return m.linear(x)


def parameter_through_a_view(m: Any, x: Tensor) -> Any:
    return x + m.linear.bias.view(1, 4).relu_()


VIEWED = "an in-place op on a tensor of which a view is used later"
CALLERS = "an in-place op on the input, which belongs to the caller,"
STATE = r"aten\.\w+\.\w+, an in-place op on a parameter"
REFUSED: list[tuple[Callable[..., Any], str]] = [
    (flattened, VIEWED),
    (piece_of_a_split, VIEWED),
    (input_itself, CALLERS),
    (input_through_a_view, CALLERS),
    (input_augmented, CALLERS),
    (parameter, STATE),
    (parameter_through_a_view, STATE),
]


def parts_of_one(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    first, second = y[:, :2], y[:, 2:]
    first += second
    second.mul_(3.0)
    y[:, 1] = x[:, 0]
    return y, first, second


def through_a_transpose(m: Any, x: Tensor) -> Any:
    y = m.linear(x)
    t, row = y.t(), y[1]
    t[0].add_(1.0)
    y[0, 1:] -= 1.0
    return t, row, y


@pytest.mark.parametrize("forward", [parts_of_one, through_a_transpose])
def test_gradients_through_views(
    forward: Any, calls: Any, randomise: Any, evaluate: Any, state: Any
) -> None:
    module = randomise(calls(forward, **parts()))
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    graph = differentiate(extract(module, TensorType((2, 4), "float64")), ["x", "linear.weight"])
    seeds = [torch.randn(t.shape, dtype=torch.float64) for _, t in graph.output_gradients]
    named = zip((name for name, _ in graph.output_gradients), seeds, strict=True)
    known = evaluate(graph, {**state(module), "x": x.detach(), **dict(named)})
    wanted = [{"x": x, "linear.weight": module.linear.weight}[name] for name, _ in graph.gradients]
    expected = torch.autograd.grad(module(x), wanted, seeds)
    for (_, value), gradient in zip(graph.gradients, expected, strict=True):
        torch.testing.assert_close(known[value], gradient)


@pytest.mark.parametrize(("forward", "message"), REFUSED)
def test_refused(forward: Any, message: str, calls: Any, state: Any) -> None:
    module = calls(forward, count=torch.ones(1), norm=nn.BatchNorm2d(4), **parts())
    module.requires_grad_(False)  # else torch refuses it, too
    before = state(module)
    with pytest.raises(UnsupportedModule, match=f"Calls, at .*: {message}"):
        extract(module, TensorType((2, 4)))
    torch.testing.assert_close(state(module), before, rtol=0, atol=0)


def buffer(m: Any, x: Tensor) -> Any:
    m.count.add_(1.0)
    return x * m.count


def moved_buffer(m: Any, x: Tensor) -> Any:
    y = m.norm(x.view(2, 4, 1, 1))
    m.norm.running_mean.mul_(0.5)
    return y


def buffer_given_back(m: Any, x: Tensor) -> Any:
    m.count.mul_(2.0).add_(x.sum())
    return m.count * x, m.count


@pytest.mark.parametrize("forward", [buffer, moved_buffer, buffer_given_back])
def test_a_buffer_is_written_after_the_pass(forward: Any, calls: Any, extracts: Any) -> None:
    module = calls(forward, count=torch.ones(1), norm=nn.BatchNorm2d(4), **parts()).double()
    graph = extracts(module, torch.randn(2, 4, dtype=torch.float64))
    assert graph.updates
