"""What the tests of the runtime share: randomised networks, a hand-picked plan, the error bound."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune import Plan, TunedModule, optimize
from plantune.devices.machine import environment_of
from plantune.graph.fusions import fusions_named
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.database.proofs import remember_proof
from plantune.plans.guess import Preference, compose
from plantune.space.search_space import load_search_space

# What is allowed beside twice the framework's own error: a few roundings of the largest value.
ROUNDINGS = 16
# How often a comparison of gradients is drawn anew: see `_gradients_within_bound`.
DRAWS = 3

# 1x1 convolutions as products, other convolutions prepacked, linear layers with their activation.
BY_HAND = (
    Preference("gemm", {"layout": "nhwc"}),
    Preference("onednn_conv", {"layout": "nhwc", "prepack": True}),
    Preference("gemm"),
)

Results = dict[str, Tensor]
PLANS = ("framework", "hand")
_picked: dict[object, Plan] = {}


@pytest.fixture(autouse=True)
def _alike_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, binaries: Path) -> None:
    """No plan that somebody stored on this machine."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cuda").symlink_to(binaries)
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))


def _randomise(module: nn.Module) -> nn.Module:
    """Weights, scalars and statistics whose absence or mix-up would change every result."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                gain = 2 if parameter.dim() == 4 else 0.1
                parameter.normal_(std=(gain / parameter[0].numel()) ** 0.5)
            elif name.endswith(("scale", "weight")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("excite.0.bias"):
                # The squeezed layers have few units: all of them dead would hide their gradients.
                parameter.uniform_(3, 4)
            else:
                parameter.normal_(std=0.3)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("running_mean"):
                buffer.normal_(std=0.3)
    return module


@pytest.fixture(scope="session")
def randomise() -> Callable[[nn.Module], nn.Module]:
    return _randomise


def _tuned(
    module: nn.Module, example: Tensor, mode: str = "infer", plan: str = "framework"
) -> TunedModule:
    """`module`, in that mode, optimized with the framework's kernels or the plan by hand.

    That one counts as proved: the tests compare it themselves, and a proof takes longer than they.
    It holds no weights, so modules that differ in these alone share it; for any other it is stale.
    """
    module.train(mode == "train")
    if plan == "framework":
        return optimize(module, example, mode=mode)
    call = (example.shape, example.stride(), example.dtype, mode)
    key = (type(module), str(module), call)
    if key not in _picked:
        _picked[key] = _by_hand(optimize(module, example, mode=mode))
    picked = _picked[key]
    remember_proof(picked, environment_of(example.device))
    return optimize(module, example, mode=mode, plan=picked)


def _by_hand(tuned: TunedModule) -> Plan:
    return compose(
        tuned._calls.expected_graph(),
        load_search_space("cpu"),
        network="by hand",
        fusions=fusions_named("conv_epilogue", "linear"),
        preferences=BY_HAND,
    )


@pytest.fixture(scope="session")
def tuned() -> Callable[..., TunedModule]:
    return _tuned


@pytest.fixture(scope="session")
def by_hand() -> Callable[[TunedModule], Plan]:
    return _by_hand


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> str:
    """The default plan, and the hand-picked one, whose weights are prepared beforehand."""
    return str(request.param)


@pytest.fixture
def small() -> nn.Module:
    """SE-ResNet9-Fixup with an eighth of the work; its input is (2, 3, 64, 64)."""
    return _randomise(SEResNet9Fixup(3, base_planes=16)).eval()


@pytest.fixture
def named() -> Callable[..., nn.Module]:
    """Layers in a row, under names, in eval mode."""
    return lambda **layers: nn.Sequential(OrderedDict(layers)).eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 64, 64)


def _results(module: nn.Module, x: Tensor, *, wrt_input: bool = False) -> Results:
    """The output, and the gradient of every parameter (and of the input) for a fixed seed."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_(wrt_input)
    y = module(x)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(seed.to(y.dtype))
    found = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    found |= {"the output": y.detach(), **({"the input": x.grad} if wrt_input else {})}
    missing = [name for name, value in found.items() if value is None or not value.any()]
    assert missing == []
    return {name: value.clone() for name, value in found.items()}


@pytest.fixture(scope="session")
def results() -> Callable[..., Results]:
    return _results


def _exact(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double()


@pytest.fixture(scope="session")
def exact() -> Callable[[nn.Module], nn.Module]:
    """A copy of a module in fp64."""
    return _exact


def _beyond_bound(got: Results, eager: Results, reference: Results) -> list[str]:
    """Whose error against the fp64 reference is more than twice the framework's own."""
    assert got.keys() == eager.keys() == reference.keys()
    largest = {name: true.abs().max().item() for name, true in reference.items()}
    # A single number may be a sum of large terms that cancel: the largest of them says how large.
    single = {name for name, true in reference.items() if true.numel() == 1}
    wrong = []
    for name, value in got.items():
        true = reference[name]
        error, own = ((v.double() - true).abs().max().item() for v in (value, eager[name]))
        scale = max(largest[other] for other in (single if name in single else {name}))
        allowed = 2 * own + ROUNDINGS * torch.finfo(value.dtype).eps * scale
        # Written so that NaN is wrong.
        if value.shape != true.shape or not error <= allowed:
            wrong.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}")
    return wrong


def _within_bound(got: Results, eager: Results, reference: Results) -> None:
    assert _beyond_bound(got, eager, reference) == []


@pytest.fixture(scope="session")
def within_bound() -> Callable[[Results, Results, Results], None]:
    """Each error against the fp64 reference is at most twice the framework's own."""
    return _within_bound


def _gradients_within_bound(
    model: nn.Module, reference: nn.Module, shape: tuple[int, ...], **options: bool
) -> None:
    """As `within_bound`, for the gradients of one of a few inputs.

    Where the input of a ReLU is within a rounding of zero, gradients jump: in eager, in the model
    or in both, by chance. What is wrong is wrong for every input.
    """
    wrong: list[str] = []
    for _ in range(DRAWS):
        x = torch.randn(shape)
        pairs = ((model, x), (reference, x), (_exact(reference), x.double()))
        wrong = _beyond_bound(*(_results(module, value, **options) for module, value in pairs))
        if not wrong:
            return
    assert wrong == []


@pytest.fixture(scope="session")
def gradients_within_bound() -> Callable[..., None]:
    return _gradients_within_bound


def _close(got: Any, expected: Any) -> None:
    got, expected = (torch.as_tensor(value).detach() for value in (got, expected))
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * largest)


@pytest.fixture(scope="session")
def close() -> Callable[[Any, Any], None]:
    """Equal but for rounding; more exact for each tensor as a whole than for its small values."""
    return _close


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs Python code in a process of its own, in an empty folder."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        quiet = "ignore:Failed to initialize NumPy:UserWarning"
        command = [sys.executable, "-W", quiet, "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run
