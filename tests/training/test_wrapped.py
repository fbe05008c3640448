"""A training step copied, saved and around wrapped models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda step: pickle.loads(pickle.dumps(step))}


def made(model):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    settings = {"scale": LossScale(4.0, growth_interval=2), "max_norm": 0.5, "micro_batches": 2}
    return TrainStep(model, cross_entropy, optimizer, **settings)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_alone(model, batches, assert_alike, how):
    step = made(model)
    for x, y in batches[:3]:
        step(x, y)
    other = COPIES[how](step)
    assert other.scale.state_dict() == step.scale.state_dict()
    before = copy.deepcopy(model.state_dict())
    found = [other(x, y) for x, y in batches[3:6]]
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    for value, (x, y) in zip(found, batches[3:6], strict=True):
        assert torch.equal(step(x, y), value)
    assert_alike(model, other.model)
    assert {int(state["step"]) for state in other.optimizer.state.values()} == {6}


def test_a_shallow_copy_steps_the_same_weights(model, batches):
    step = made(model)
    step(*batches[0])
    other, before = copy.copy(step), copy.deepcopy(model.state_dict())
    other(*batches[1])
    assert other.model is model
    assert not torch.equal(before["0.weight"], model[0].weight)


def test_what_a_process_group_shares_is_not_copied(model, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match=r"give it the module inside, and process_group="):
            made(nn.Sequential(wrapped))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        group = torch.distributed.group.WORLD
        step = TrainStep(model, cross_entropy, optimizer, process_group=group)
        with pytest.raises(TypeError, match="make one in each process"):
            copy.deepcopy(step)
        step.close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
def test_torch_compile_round_the_model(model, twin, eager, batches, assert_alike):
    torch._dynamo.reset()
    other = twin(model)
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    compiled = torch.compile(model, backend="eager")
    step = TrainStep(compiled, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    for x, y in batches[:3]:
        torch.testing.assert_close(step(x, y), eager(other, theirs, x, y))
    assert_alike(model, other)


def test_data_parallel_on_no_gpu_is_the_module(model, twin, eager, batches, assert_alike):
    other = twin(model)
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(nn.DataParallel(model), cross_entropy, optimizer)
    for x, y in batches[:3]:
        torch.testing.assert_close(step(x, y), eager(other, theirs, x, y))
    assert_alike(model, other)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("model", nn.Linear, "an nn.Module, got the class Linear"),
        ("loss", nn.CrossEntropyLoss, "loss module that is made, got the class CrossEntropyLoss"),
        ("loss", None, "got None"),
        ("optimizer", torch.optim.SGD, "got the class SGD"),
        ("optimizer", [], r"a torch.optim.Optimizer, got \[\]"),
        ("micro_batches", 2.0, "a whole number, 1 or more, got 2.0"),
        ("autocast", "bfloat16", "a torch.dtype of floats, or None, got 'bfloat16'"),
    ],
)
def test_what_is_of_another_kind_is_named(model, name, given, said):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    right = {"model": model, "loss": cross_entropy, "optimizer": optimizer}
    with pytest.raises(TypeError, match=f"{name} must be .*{said}"):
        TrainStep(**{**right, name: given})


def test_another_state_and_inference_mode_are_refused_with_the_reason(model, batches):
    step = made(model)
    with pytest.raises(ValueError, match=r"no state_dict\(\) of a TrainStep: it lacks opt"):
        step.load_state_dict(model.state_dict())
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inference_mode\(\) there are"):
        step(*batches[0])
