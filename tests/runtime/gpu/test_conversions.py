"""What a user makes of a tuned module on a GPU, as on the CPU."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from plantune import TunedModule, UnplannedCall, optimize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


class TestConversions:
    @pytest.mark.parametrize("convert", ["float", "bfloat16", "double"])
    def test_another_dtype_runs_through_the_framework(self, small, images, convert):
        model = optimize(small, images)
        model(images)
        getattr(model, convert)()
        x = getattr(images, convert)()
        with pytest.warns(UnplannedCall, match="moved to"):
            assert torch.equal(model(x), model.reference(x))

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_there_and_back_again(self, small, images, mode, assert_right, assert_trains):
        model = optimize(small, images, mode=mode)
        model(images)
        model.cpu().float().half().cuda()
        assert_right(model(images), small, images)
        if mode == "train":
            assert_trains(model, small, images)

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_weights_that_move_between_passes(
        self, small, images, mode, assert_right, assert_trains
    ):
        """New graphs are captured while what the old ones made is still there."""
        model = optimize(small, images, mode=mode)
        for _ in range(3):
            found = model(images)
            if mode == "train":
                found.float().sum().backward()
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        assert_right(model(images), small, images)
        if mode == "train":
            assert_trains(model, small, images)

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_has_all_and_shares_nothing(
        self, small, images, how, assert_right, assert_trains
    ):
        model = optimize(small, images, mode="train")
        model(images).sum().backward()
        model.zero_grad()
        duplicate = {
            "deepcopy": copy.deepcopy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
            "torch.save": through_a_file,
        }[how]
        other = duplicate(model)
        assert type(other) is type(model)
        assert isinstance(other, TunedModule)
        assert_trains(other, small, images)
        addresses = [{p.data_ptr() for p in m.parameters()} for m in (model, other)]
        assert addresses[0].isdisjoint(addresses[1])
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        assert_right(other(images), other.reference, images)
        assert_right(model(images), small, images)

    @pytest.mark.usefixtures("planned")
    def test_batch_norm_of_16_bit_weights_trains(self, randomise, images, assert_trains):
        layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        module = randomise(nn.Sequential(*layers)).cuda().half().train()
        assert_trains(optimize(module, images, mode="train"), module, images)

    # torch's compiler imports a part of torch that says so of itself.
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_torch_compile_round_it(self, small, images, backend, assert_right, assert_trains):
        torch._dynamo.reset()
        model = optimize(small, images, mode="train")
        compiled = torch.compile(model, backend=backend)
        for step in range(3):
            x = images + step
            assert_right(compiled(x), small, x)
        assert_trains(compiled, small, images)

    def test_distributed_data_parallel(self, small, images, tmp_path, assert_trains):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
        )
        try:
            wrapped = nn.parallel.DistributedDataParallel(optimize(small, images, mode="train"))
            assert_trains(wrapped, small, images)
        finally:
            torch.distributed.destroy_process_group()

    # Autograd's thread runs the head's product before anything that gives a thread a context: torch
    # says so once in a process, of the framework's pass as of ours, and helps itself.
    @pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
    @pytest.mark.usefixtures("planned")
    def test_a_part_of_a_larger_module(self, small, images, assert_right, assert_trains):
        model = optimize(small, images, mode="train")
        head = nn.Sequential(nn.Flatten(), nn.Linear(512, 5)).cuda().half()
        whole, plain = nn.Sequential(model, head), nn.Sequential(small, head)
        assert_right(whole(images), plain, images)
        assert_trains(whole, plain, images)


def through_a_file(model):
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)
