"""What passes hold of a GPU's memory: no second copy of what their kernels read in place."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from plantune import TrainStep, optimize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


@pytest.fixture
def many():
    """6 MiB of images."""
    return torch.randn(256, 3, 64, 64, device="cuda", dtype=torch.float16)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_images_get_a_place_once_one_must_be_copied(small, many, mode, off, planned):
    model, reference = optimize(small.train(mode == "train"), many, mode=mode), copy.deepcopy(small)

    with torch.no_grad():
        dy = torch.randn_like(reference(many)) / 64

    def gradients(module, y):
        # Of random signs: sums over a million pixels must not overflow.
        found = torch.autograd.grad(y, list(module.parameters()), dy)
        return torch.cat([gradient.flatten().float() for gradient in found])

    def held(x):
        with torch.set_grad_enabled(mode == "train"):
            y, wanted = model(x), reference(x)
        assert off(y, wanted) < 0.01
        if mode == "train":
            assert off(gradients(model, y), gradients(reference, wanted)) < 0.2
        return model.stats().held_bytes

    first = held(many)
    assert held(many * 2) == first
    assert held(many.contiguous(memory_format=torch.channels_last)) == first + many.nbytes
    assert held(many) == first + many.nbytes


def test_a_training_step_reads_images_where_they_are(small, many):
    model = small.train()
    target = torch.randn(256, 128, 2, 2, device="cuda")

    def loss(y, target):
        return (y.float() - target).square().mean()

    step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 1e-3))
    for _ in range(3):
        step(many, target)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    values = [step(many, target) for _ in range(3)]
    assert torch.stack(values).isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < many.nbytes / 2
    (tuned,) = step._models._made.values()
    (program,) = tuned._calls.programs()
    assert program._program.values["x"].untyped_storage().nbytes() == 0
