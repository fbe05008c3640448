"""Random inputs of a step: every byte, divisors away from 0, pixels as large as pixels are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plantune.graph.builder import GraphBuilder
from plantune.graph.ops import Domain
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.measure import inputs
from plantune.measure.inputs import domain_of, draw_inputs
from plantune.measure.scenes import with_small

from .conftest import IMAGE


def step_of(dtype: str, *ops: tuple[str, dict[str, object]]) -> Step:
    builder = GraphBuilder()
    value = builder.input("x", TensorType((64, 64), dtype))
    builder.input("other", TensorType((64, 64), "float32"))
    for op, attrs in ops:
        others = ("other",) if op == "div" else ()
        (value,) = builder.emit(op, value, *others, **attrs)
    graph = builder.build((value,))
    return make_step(graph, [node.name for node in graph.nodes])


def drawn(step: Step) -> dict[str, torch.Tensor]:
    return draw_inputs(step, torch.Generator().manual_seed(0))


CAST = ("cast", {"dtype": "float16"})
SCALE = ("affine", {"alpha": 1 / 128, "beta": 0.0})


def test_bytes_are_drawn_from_all_of_them():
    x = drawn(step_of("uint8", CAST))["x"]
    assert x.dtype == torch.uint8
    assert x.unique().numel() == 256
    assert x.float().mean() == pytest.approx(127.5, rel=0.05)


@pytest.mark.parametrize("ops", [(SCALE,), (CAST, SCALE), (CAST, CAST, SCALE)])
def test_floats_that_are_scaled_are_as_large_as_pixels(ops):
    plain = drawn(step_of("float32", ("cast", {"dtype": "float16"})))["x"]
    assert torch.equal(drawn(step_of("float32", *ops))["x"], plain * 128)


def test_a_tiny_scale_makes_no_huge_number():
    tiny = ("affine", {"alpha": 1e-9, "beta": 0.0})
    assert drawn(step_of("float32", CAST, tiny))["x"].abs().max() < 65504 / 16


def test_divisors_stay_away_from_zero():
    step = step_of("float32", ("div", {}))
    assert domain_of(step, "other").kind == "positive"
    assert domain_of(step, "x").kind == "real"
    data = with_small(step, drawn(step), torch.Generator().manual_seed(0))
    assert data["other"].min() >= 0.5
    assert (data["x"] == 0).any()


def test_places_of_maxima_are_in_their_windows():
    """Torch's gradient on a GPU looks nowhere else, as nothing else is ever there."""
    window = {"kernel": (3, 2), "stride": (2, 3), "padding": (1, 1)}
    pooled, shape = TensorType((2, 3, 4, 2)), (2, 3, 7, 5)
    builder = GraphBuilder()
    dy = builder.input("dy", pooled)
    places = builder.input("places", TensorType(pooled.shape, "int64"))
    graph = builder.build(builder.emit("max_pool2d_grad", dy, places, shape=shape, **window))
    found = drawn(make_step(graph, [graph.nodes[0].name]))["places"]
    rows, columns = found // shape[3], found % shape[3]
    for row, first, last in ((0, 0, 1), (1, 1, 3), (2, 3, 5), (3, 5, 6)):
        assert first <= rows[:, :, row].min() <= rows[:, :, row].max() <= last
    for column, first, last in ((0, 0, 0), (1, 2, 3)):
        assert first <= columns[..., column].min() <= columns[..., column].max() <= last
    assert len(set(rows[:, :, 1].flatten().tolist())) > 1


@pytest.mark.parametrize(("images", "part"), [(8, 1 / 8), (1, 1.0)])
def test_large_sums_fit_a_float16(images, part):
    """They were infinite, here and in PyTorch, so that any kernel was right."""

    def inputs(dtype):
        builder = GraphBuilder()
        a, b, c = (builder.input(name, TensorType((images, 64, 16, 16), dtype)) for name in "abc")
        (product,) = builder.emit("mul", a, b)
        (value,) = builder.emit("add", product, c)
        graph = builder.build((value, *builder.emit("sum_to", value, shape=(1,))))
        return drawn(make_step(graph, [node.name for node in graph.nodes]))

    small, usual = inputs("float16"), inputs("bfloat16")
    assert small["a"].double().sum().abs() < 16384
    ratios = [small[name].double().std() / usual[name].double().std() for name in "abc"]
    assert ratios == pytest.approx([part, 1.0, part], rel=0.01)


@pytest.mark.parametrize(("images", "part"), [(2, 1 / 4), (1, 1 / 2)])
def test_gradients_of_weights_fit_a_float16(images, part):
    """As sums over the pixels of 2,048 images they were infinite, in PyTorch, too: then a wrong
    kernel was as good, and a right one was blamed for an infinity beside a poison.
    """
    pixels, filters = TensorType((images, 2, 181, 181), "float16"), (2, 2, 1, 1)

    def step_of_gradient(dtype):
        builder = GraphBuilder()
        dy, x = (builder.input(name, replace(pixels, dtype=dtype)) for name in ("dy", "x"))
        geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        graph = builder.build(builder.emit("conv2d_wgrad", dy, x, shape=filters, **geometry))
        return make_step(graph, [node.name for node in graph.nodes])

    data, usual = drawn(step_of_gradient("float16")), drawn(step_of_gradient("bfloat16"))
    ratios = [data[name].double().std() / usual[name].double().std() for name in ("dy", "x")]
    assert ratios == pytest.approx([part, 1.0], rel=0.01)


def test_numbers_are_drawn_in_the_domain_of_their_readers(step_of):
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}

    def emit(b):
        dy = b.input("dy", TensorType((2, 3, 3, 3)))
        places = b.input("places", TensorType((2, 3, 3, 3), "int64"))
        var = b.input("var", TensorType((300,)))
        (dx,) = b.emit("max_pool2d_grad", dy, places, shape=(2, 3, 6, 6), **window)
        return (dx, *b.emit("rsqrt", var, eps=1e-5))

    step = step_of(emit)
    data = draw_inputs(step, torch.Generator().manual_seed(0))
    assert 0 <= data["places"].min() <= data["places"].max() < 36
    assert len(data["places"].unique()) > 10
    assert (data["var"] > 0).all()
    assert (data["dy"] == 0).any()
    assert (data["dy"] < 0).any()


def test_scalars_are_far_from_zero(step_of):
    step = step_of(lambda b: b.emit("mul", b.input("x", IMAGE), b.parameter("s", TensorType((1,)))))
    for seed in range(20):
        data = draw_inputs(step, torch.Generator().manual_seed(seed))
        assert 0.5 <= abs(float(data["s"])) <= 1.5


def test_seeds_differ_and_repeat(relu):
    draw = [draw_inputs(relu, torch.Generator().manual_seed(seed))["x"] for seed in (0, 0, 1)]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])


def test_the_addends_of_many_residuals_are_found_at_once():
    """Each doubles the ways to the input: a search of ResNet-50 drew them for minutes."""
    builder = GraphBuilder()
    value = builder.input("x", TensorType((1 << 16,), "float16"))
    for _ in range(60):
        (value,) = builder.emit("add", value, value)
    graph = builder.build(builder.emit("sum", value, dims=(0,), keepdim=False))
    step = make_step(graph, [node.name for node in graph.nodes])
    plain = make_step(graph, [node.name for node in graph.nodes[:-1]])
    assert torch.equal(drawn(step)["x"], drawn(plain)["x"] / 4)


@pytest.mark.parametrize(("dtype", "below"), [("bool", 2), ("uint8", 256), ("int8", 128)])
def test_an_index_of_few_bits_holds_what_its_dtype_does(monkeypatch, dtype, below):
    """The op says what it may point at: the mask of torch.where has as many places as the rest."""
    monkeypatch.setattr(inputs, "domain_of", lambda step, name: Domain("index", below=1000))
    x = drawn(step_of(dtype, CAST))["x"]
    assert (str(x.dtype), int(x.max())) == (f"torch.{dtype}", below - 1)
