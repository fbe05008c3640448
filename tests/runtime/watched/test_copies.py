"""The tuned module moved, copied, saved and wrapped."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

from plantune import TunedModule, UnplannedCall, load_model, optimize
from plantune.errors import UnsupportedModule


@pytest.fixture
def model(small, images, tuned):
    """In train mode with the hand-picked plan, after a first pass."""
    made = tuned(small, images, "train", "hand")
    made(images).sum().backward()
    made.zero_grad()
    return made


@pytest.fixture
def same_training(images, close):
    """Checks that two modules give the same output and gradients."""

    def check(model, reference, x=images):
        found = []
        for module in (model, reference):
            module.zero_grad()
            y = module(x)
            y.square().sum().backward()
            found.append([y, *(p.grad for p in module.parameters())])
        for ours, theirs in zip(*found, strict=True):
            close(ours, theirs)

    return check


class TestConversions:
    @pytest.mark.parametrize(
        ("convert", "dtype"),
        [
            (lambda m: m.to(torch.float64), torch.float64),
            (lambda m: m.double(), torch.float64),
            (lambda m: m.half(), torch.float16),
            (lambda m: m.bfloat16(), torch.bfloat16),
        ],
        ids=["to", "double", "half", "bfloat16"],
    )
    def test_another_dtype_runs_through_the_framework(self, convert, dtype, model, images):
        reference = convert(copy.deepcopy(model.reference))
        assert convert(model) is model
        assert all(p.dtype == dtype for p in model.parameters())
        with pytest.warns(UnplannedCall, match=f"moved to {dtype}"):
            y = model(images.to(dtype))
        assert y.dtype == dtype
        assert torch.equal(y, reference(images.to(dtype)))

    def test_there_and_back_again(self, model, small, images, same_training):
        model.double().float()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same_training(model, small)

    def test_to_the_same_is_nothing(self, model, small, same_training):
        assert model.to("cpu", torch.float32) is model
        same_training(model, small)

    def test_channels_last_weights(self, model, small, same_training):
        same_training(model.to(memory_format=torch.channels_last), small)

    def test_to_empty_and_loaded(self, model, small, same_training):
        model.to_empty(device="cpu").load_state_dict(small.state_dict())
        same_training(model, small)

    def test_shared_memory(self, model, small, same_training):
        same_training(model.share_memory(), small)

    def test_a_plan_for_another_dtype(self, tuned, randomise, images, named, close):
        module = randomise(named(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), relu=nn.ReLU()))
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            reference = copy.deepcopy(module).to(dtype).eval()
            model = tuned(reference, images.to(dtype))
            expected = module.eval()(images).double()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                y = model(images.to(dtype))
            assert y.dtype == dtype
            own = (reference(images.to(dtype)).double() - expected).abs().max()
            assert (y.double() - expected).abs().max() <= 2 * own + 1e-6


def through_a_file(model):
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


class TestCopies:
    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_a_file],
        ids=["deepcopy", "pickle", "torch.save"],
    )
    def test_a_copy_has_all_and_shares_nothing(self, duplicate, model, small, same_training):
        other = duplicate(model)
        assert type(other) is type(model)
        assert isinstance(other, TunedModule)
        assert other.plan == model.plan
        assert other.training
        same_training(other, model)
        shared = {p.data_ptr() for p in model.parameters()} & {
            p.data_ptr() for p in other.parameters()
        }
        assert shared == set()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        same_training(other, other.reference)
        same_training(model, small)

    def test_a_copy_keeps_reference_and_face_together(self, model):
        other = copy.deepcopy(model)
        for (name, ours), theirs in zip(
            other.named_parameters(), other.reference.parameters(), strict=True
        ):
            assert ours is theirs, name
        assert other.reference is not model.reference

    def test_a_shallow_copy_shares_the_weights(self, model, images, close):
        other = copy.copy(model)
        with torch.no_grad():
            model.layers[0][0].conv1.weight.mul_(2)
        close(other(images), model(images))
        close(other(images), model.reference(images))

    def test_a_copy_in_a_live_graph_is_not_part_of_it(self, model, small, images, same_training):
        loss = model(images).sum()
        other = copy.deepcopy(model)
        same_training(other, small)
        loss.backward()

    def test_pickled_bytes_hold_no_program(self, model, images):
        size = len(pickle.dumps(model))
        for _ in range(3):
            model(images).sum().backward()
        model.zero_grad()
        assert len(pickle.dumps(model)) == size

    def test_the_state_dict_through_a_file(self, model, small, tmp_path, same_training, images):
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        state = torch.load(tmp_path / "weights.pt", weights_only=True)
        other = optimize(type(small)(3, base_planes=16), images, mode="train")
        other.load_state_dict(state, strict=True)
        same_training(other, small)

    def test_a_checkpoint_of_the_reference_loads_by_name(self, randomise, tmp_path, close):
        from plantune.models.se_resnet9 import se_resnet9_fixup

        reference = randomise(se_resnet9_fixup(1))
        torch.save(reference.state_dict(), tmp_path / "weights.pt")
        x = torch.randn(1, 1, 64, 64)
        for weights in (reference.state_dict(), tmp_path / "weights.pt"):
            model = load_model(
                "se_resnet9_fixup", batch=1, in_channels=1, weights=weights, fallback="silent"
            )
            close(model(x), reference(x))


class TestWrappers:
    @pytest.fixture
    def group(self, tmp_path):
        """A process group of this process alone."""
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
        )
        yield
        torch.distributed.destroy_process_group()

    @pytest.mark.usefixtures("group")
    def test_distributed_data_parallel(self, model, small, images, close):
        wrapped = nn.parallel.DistributedDataParallel(model)
        pair = [(m, torch.optim.SGD(m.parameters(), lr=1e-3)) for m in (wrapped, small)]
        for step in range(3):
            for module, optimizer in pair:
                optimizer.zero_grad()
                module(images + step).square().mean().backward()
                optimizer.step()
        for ours, theirs in zip(model.parameters(), small.parameters(), strict=True):
            close(ours, theirs)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_torch_compile_round_it(self, backend, model, small, images, close):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        for step in range(3):
            x = images + step
            close(compiled(x), small(x))
        model.zero_grad()
        compiled(images).square().sum().backward()
        small(images).square().sum().backward()
        for ours, theirs in zip(model.parameters(), small.parameters(), strict=True):
            close(ours.grad, theirs.grad)

    def test_one_graph_of_torch_compile_cannot_hold_it(self, model, small, images, close):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            compiled(images)
        close(model(images), small(images))

    def test_torch_compile_round_a_larger_module(self, model, small, images, close):
        torch._dynamo.reset()
        head = nn.Sequential(nn.Flatten(), nn.Linear(512, 5))
        compiled = torch.compile(nn.Sequential(model, head), backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            small.zero_grad()
            ours, theirs = compiled(images), head(small(images))
            close(ours, theirs)
            ours.square().sum().backward()
            theirs.square().sum().backward()
            close(model.stem[1].weight.grad, small.stem[1].weight.grad)
            with torch.no_grad():
                for module in (model, small):
                    module.stem[1].weight.mul_(1.1)

    def test_a_part_of_a_larger_module(self, model, small, images, close):
        head = nn.Sequential(nn.Flatten(), nn.Linear(512, 5))
        whole, plain = nn.Sequential(model, head), nn.Sequential(small, head)
        assert list(whole.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(whole.state_dict(), strict=True)
        close(whole(images), plain(images))
        assert not whole.eval()[0].training
        assert not model.reference.training


class Guarded(nn.Linear):
    """With a lock, as modules have that several threads call, and perhaps an open file."""

    def __init__(self, **attributes: object) -> None:
        super().__init__(4, 2)
        self.lock = threading.Lock()
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


@pytest.mark.parametrize("share", [False, True])
def test_a_copy_has_locks_of_its_own(share: bool) -> None:
    module, x = Guarded().eval(), torch.randn(3, 4)
    with module.lock:
        tuned = optimize(module, x, share=share)
        torch.testing.assert_close(tuned(x), nn.Linear.forward(module, x))


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    with open(os.devnull) as file:
        module = nn.Sequential(Guarded(log={"file": file}))
        with pytest.raises(UnsupportedModule, match=r"because of self\.0\.log: .* optimize"):
            optimize(module, torch.randn(3, 4))
