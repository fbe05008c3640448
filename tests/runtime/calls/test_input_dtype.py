"""Images of another dtype than the network's, which the module itself casts and scales."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.runtime.module import UnplannedCall


class Scaled(nn.Module):
    """A network after what its images need."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x.to(self.network.stem[1].weight.dtype) / 255)


@pytest.fixture
def scaled(small):
    return Scaled(small)


@pytest.fixture
def pixels():
    return torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)


@pytest.mark.filterwarnings("error")
class TestCalls:
    def test_bytes(self, plan, scaled, pixels, tuned, exact, within_bound):
        model = tuned(scaled, pixels, plan=plan)
        for x in (pixels, 255 - pixels, pixels.to(memory_format=torch.channels_last)):
            found, eager, true = (m(x).detach() for m in (model, scaled, exact(scaled)))
            within_bound({"y": found}, {"y": eager}, {"y": true})

    def test_floats_for_a_network_of_fewer_digits(self, scaled, tuned, exact, within_bound):
        scaled.bfloat16()
        x = 255 * torch.rand(2, 3, 64, 64)
        model = tuned(scaled, x)
        found, eager, true = (m(x).detach() for m in (model, scaled, exact(scaled)))
        assert found.dtype == torch.bfloat16
        within_bound({"y": found}, {"y": eager}, {"y": true})

    def test_gradients(self, plan, scaled, pixels, tuned, exact, results, within_bound):
        model = tuned(scaled, pixels, mode="train", plan=plan)
        within_bound(*(results(m, pixels) for m in (model, scaled, exact(scaled))))

    def test_weights_that_change_are_used(self, plan, scaled, pixels, tuned):
        model = tuned(scaled, pixels, plan=plan)
        before = model(pixels)
        with torch.no_grad():
            model.network.stem[1].weight.mul_(2)
        after = model(pixels)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, model.reference(pixels), rtol=1e-3, atol=1e-4)


def test_another_number_of_images_runs_in_the_framework(scaled, pixels, tuned):
    model = tuned(scaled, pixels)
    with pytest.warns(UnplannedCall, match="it was made for input"):
        found = model(pixels[:1])
    assert torch.equal(found, model.reference(pixels[:1]))


def test_another_dtype_for_a_network_that_casts_runs_in_the_framework(scaled, pixels, tuned):
    model = tuned(scaled, pixels)
    with pytest.warns(UnplannedCall, match=r"\(2, 3, 64, 64\) uint8, got \(2, 3, 64, 64\) int64"):
        found = model(pixels.long())
    assert torch.equal(found, model.reference(pixels.long()))
