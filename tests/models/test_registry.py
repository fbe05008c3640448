from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from plantune.errors import PlantuneError, UnknownNetwork
from plantune.models.registry import NetworkSpec, network, network_names

OUTPUTS = {
    "se_resnet9_fixup": (1, 512, 2, 2),
    "resnet18": (1, 1000),
    "resnet34": (1, 1000),
    "resnet50": (1, 1000),
}


def test_names_are_sorted_and_known() -> None:
    assert network_names() == tuple(sorted(OUTPUTS))
    assert [network(name).name for name in network_names()] == list(network_names())


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("in_channels", [1, 3])
def test_builds_a_network_for_its_input_shape(name: str, in_channels: int) -> None:
    spec = network(name)
    model = spec.build(in_channels).eval()
    with torch.no_grad():
        output = model(torch.randn(spec.input_shape(1, in_channels)))
    assert output.shape == OUTPUTS[name]
    assert output.isfinite().all()


def test_builds_the_network_of_its_name() -> None:
    counts = {name: len(list(network(name).build(3).parameters())) for name in network_names()}
    assert counts == {"se_resnet9_fixup": 48, "resnet18": 62, "resnet34": 110, "resnet50": 161}


def test_input_shapes() -> None:
    assert network("se_resnet9_fixup").input_shape(128, 11) == (128, 11, 64, 64)
    assert network("resnet50").input_shape(64) == (64, 3, 224, 224)


def test_each_build_is_a_network_of_its_own() -> None:
    first, second = (network("se_resnet9_fixup").build(3) for _ in range(2))
    assert first.stem[1].weight.data_ptr() != second.stem[1].weight.data_ptr()


def test_spec_is_frozen_and_hashable() -> None:
    spec = network("resnet18")
    assert {spec: 1}[network("resnet18")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]
    assert isinstance(spec, NetworkSpec)


@pytest.mark.parametrize(
    ("name", "close"), [("resnet-18", "resnet18"), ("SE_ResNet9", "se_resnet9_fixup")]
)
def test_unknown_name_suggests_close_ones(name: str, close: str) -> None:
    with pytest.raises(UnknownNetwork) as caught:
        network(name)
    message = str(caught.value)
    assert repr(name) in message
    suggestion, _, _ = message.partition("?")
    assert close in suggestion.partition("did you mean")[2]


def test_unknown_name_lists_every_known_one() -> None:
    with pytest.raises(PlantuneError) as caught:
        network("transformer")
    message = str(caught.value)
    assert message.endswith("known networks are " + ", ".join(network_names()))
    assert "did you mean" not in message


def test_listing_names_imports_no_torch() -> None:
    code = (
        "import sys; from plantune.models.registry import network, network_names; "
        "[network(name).input_shape(1) for name in network_names()]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
