"""What records or transforms a call gets the module's own operations."""

from __future__ import annotations

import io
import os
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.overrides import TorchFunctionMode

from plantune import optimize
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


SHAPE = (2, 3, 8, 8)


@pytest.fixture(params=["infer", "train"])
def pair(request):
    """A module and its tuned copy, which was called before."""
    module = Net().train(request.param == "train")
    model = optimize(module, torch.randn(SHAPE), mode=request.param)
    model(torch.randn(SHAPE))
    assert model.last_call().how == "planned"
    return module, model


@pytest.fixture
def x():
    return torch.randn(SHAPE)


def test_an_input_that_a_transform_left_behind(pair, x, close):
    module, model = pair
    kept = []
    grad(lambda v: (kept.append(v), v.square().sum())[1])(x)
    close(model(kept[0]), module(x))
    assert model.last_call().how == "planned"
    if module.training:
        model(kept[0]).square().sum().backward()
        ours, model.head.weight.grad = model.head.weight.grad, None
        module(x).square().sum().backward()
        close(ours, module.head.weight.grad)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return made * 2 if function is torch.relu else made


def test_a_mode_that_sees_functions(pair, x, close):
    module, model = pair
    with Doubled(), torch.device("cpu"):
        close(model(x), module(x))
    assert model.last_call().how == "eager"
    close(model(x), module(x))
    assert model.last_call().how == "planned"


class TestFunctional:
    def test_a_gradient_of_the_input(self, pair, x, close):
        expected, got = (grad(lambda v, m=m: m(v).square().sum())(x) for m in pair)
        assert expected.any()
        close(got, expected)

    def test_a_gradient_of_parameters(self, pair, x, close):
        def loss(parameters, module):
            return functional_call(module, parameters, (x,)).square().sum()

        parameters = {name: p.detach() for name, p in pair[0].named_parameters()}
        expected, got = (grad(loss)(parameters, m) for m in pair)
        for name, value in expected.items():
            assert value.any()
            close(got[name], value)

    def test_many_inputs_at_once(self, pair, close):
        xs = torch.randn(3, *SHAPE)
        expected, got = (vmap(m)(xs) for m in pair)
        close(got, expected)

    def test_many_networks_at_once(self, pair, x, close):
        stacked = {n: torch.stack([p, p * 2]).detach() for n, p in pair[0].named_parameters()}
        expected, got = (vmap(lambda p, m=m: functional_call(m, p, (x,)))(stacked) for m in pair)
        close(got, expected)

    def test_a_product_with_the_jacobian(self, pair, x, close):
        v = torch.randn(SHAPE)
        for expected, got in zip(*(jvp(m, (x,), (v,)) for m in pair), strict=True):
            assert expected.any()
            close(got, expected)

    def test_forward_mode_without_torch_func(self, pair, x, close):
        from torch.autograd import forward_ad

        found = []
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones(SHAPE))
            found = [forward_ad.unpack_dual(m(dual)).tangent for m in pair]
        close(*found)
        close(pair[1](x), pair[0](x))

    def test_the_next_call_is_planned_again(self, pair, x, close):
        vmap(pair[1])(x[None])
        close(pair[1](x), pair[0](x))
        assert pair[1].last_call().how == "planned"


class TestRecorded:
    """What is recorded is no call of a plan, and holds for another input, too."""

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_jit_trace(self, pair, x, close):
        traced = torch.jit.trace(pair[1], torch.zeros(SHAPE))
        close(traced(x), pair[0](x))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        close(torch.jit.load(file)(x), pair[0](x))

    def test_make_fx(self, pair, x, close):
        from torch.fx.experimental.proxy_tensor import make_fx

        traced = make_fx(pair[1])(torch.zeros(SHAPE))
        assert any("convolution" in str(node.target) for node in traced.graph.nodes)
        close(traced(x), pair[0](x))

    @pytest.mark.filterwarnings("ignore")
    def test_export(self, pair, x, close):
        exported = torch.export.export(pair[1], (torch.zeros(SHAPE),), strict=False)
        assert set(exported.state_dict) == set(pair[0].state_dict())
        close(exported.module()(x), pair[0](x))

    @pytest.mark.parametrize("dynamo", [True, False], ids=["by export", "by trace"])
    @pytest.mark.filterwarnings("ignore")
    def test_onnx(self, dynamo, pair, x, close):
        onnx = pytest.importorskip("onnx")
        from onnx.reference import ReferenceEvaluator

        file = io.BytesIO()
        options = {} if dynamo else {"training": torch.onnx.TrainingMode.PRESERVE}
        torch.onnx.export(pair[1], (torch.zeros(SHAPE),), file, dynamo=dynamo, **options)
        exported = onnx.load_from_string(file.getvalue())
        (given,) = exported.graph.input
        (found,) = ReferenceEvaluator(exported).run(None, {given.name: x.numpy()})
        close(torch.from_numpy(found), pair[0](x))

    def test_fx(self, pair, x, close):
        traced = torch.fx.symbolic_trace(nn.Sequential(pair[1]))
        assert "conv" in traced.code
        close(traced(x), pair[0](x))

    def test_a_part_of_what_is_optimized(self, pair, x, close):
        whole = nn.Sequential(pair[1], nn.ReLU())
        whole.train(pair[1].training)
        assert extract(whole, TensorType(SHAPE)).nodes[0].op == "conv2d"
        close(optimize(whole.eval(), x)(x), whole(x))


class TestInOtherHands:
    def test_data_parallel(self, pair, x, close):
        """Without a GPU it calls the module; replicas on GPUs are the reference's."""
        close(nn.DataParallel(pair[1])(x), pair[0](x))
        replica = pair[1]._replicate_for_data_parallel()
        assert type(replica) is Net

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    @pytest.mark.filterwarnings("ignore")
    def test_fork_after_a_call(self, pair, x):
        expected = pair[1](x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(pair[1](x), expected) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestInference:
    def test_no_gradient_is_recorded_beside_the_plan(self, x, close):
        module = Net().eval()
        model = optimize(module, x, fallback="silent")
        ragged = model(x[:1])
        assert not ragged.requires_grad
        ragged.numpy()
        close(ragged, module(x[:1]))


class TestEnvironment:
    def test_disabled(self, monkeypatch, x):
        monkeypatch.setenv("PLANTUNE_DISABLE", "1")
        module = Net().eval()
        model = optimize(module, x, fallback="error")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(model(x), module(x))
        assert (model.last_call().how, model.stats().eager) == ("eager", 1)
        assert "PLANTUNE_DISABLE" in model.last_call().reason

    def test_a_log_says_when_the_way_changes(self, monkeypatch, capsys, x):
        monkeypatch.setenv("PLANTUNE_LOG", "1")
        model = optimize(Net().eval(), x, fallback="silent")
        for given in (x, x, x[:1], x):
            model(given)
        said = [line for line in capsys.readouterr().err.splitlines() if "plantune" in line]
        assert ["planned" in line for line in said] == [True, False, True]
        assert "it was made for input (2, 3, 8, 8), got (1, 3, 8, 8)" in said[1]

    def test_counters(self, x):
        model = optimize(Net().eval(), x, fallback="silent")
        for given in (x, x, x[:1]):
            model(given)
        stats = model.stats()
        assert (stats.planned, stats.eager, stats.instances) == (2, 1, 1)
        assert (stats.captures, stats.held_bytes) == (0, 0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_another_default_dtype(self, dtype, x, close, tuned):
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        for mode in ("infer", "train"):
            model = tuned(module, x, mode, "hand")
            torch.set_default_dtype(dtype)
            try:
                y = model(x)
            finally:
                torch.set_default_dtype(torch.float32)
            assert y.dtype == torch.float32
            close(y, model.reference(x))
