"""What a user gives to a tuned module on a GPU, as on the CPU."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

from plantune import UnplannedCall, optimize
from plantune.devices.cuda import patches
from plantune.errors import InputMismatch

from ..awkward import AWKWARD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
# More calls than it takes until a graph reads its input where it lies.
CALLS = 20
HUGE = (1 << 31) + 12_345


class TestOtherShapes:
    @pytest.mark.parametrize("batch", [0, 1, 3, 80])
    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_another_batch_is_right_with_one_warning(self, small, images, batch, mode):
        model = optimize(small, images, mode=mode)
        model(images)
        x = torch.randn(batch, 3, 64, 64, device="cuda", dtype=torch.float16)
        with pytest.warns(UnplannedCall, match=rf"\(2, 3, 64, 64\), got \({batch}, 3"):
            assert torch.equal(model(x), model.reference(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)

    def test_fallback_error_refuses_it_and_stays_usable(self, small, images, assert_right):
        model = optimize(small, images, fallback="error")
        with pytest.raises(InputMismatch, match=r"got \(3, 3, 64, 64\)"):
            model(torch.cat([images, images])[:3])
        assert_right(model(images), small, images)

    @pytest.mark.usefixtures("planned")
    def test_channels_last(self, small, images, assert_right):
        last = images.contiguous(memory_format=torch.channels_last)
        for example in (images, last):
            model = optimize(small, example)
            for x in (images, last):
                assert_right(model(x), small, images)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor([-0.5]))

    def forward(self, x):
        return torch.relu(x + self.shift)


class TestAwkwardInputs:
    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("plan", ["framework", "hand"])
    @pytest.mark.parametrize("awkward", AWKWARD)
    def test_a_view_is_read_right_and_never_written(
        self, small, images, awkward, plan, tuned, assert_right
    ):
        model = tuned(small, images, plan=plan)
        x = AWKWARD[awkward](images)
        copied = x.detach().clone(memory_format=torch.contiguous_format)
        for _ in range(CALLS):
            found = model(x)
        assert_right(found, small, copied)
        assert torch.equal(x, copied)
        if awkward == "misaligned":
            x.mul_(2)
            assert_right(model(x), small, x)

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_a_plan_for_no_image(self, small, images, mode):
        model = optimize(small, images[:0], mode=mode)
        for _ in range(2):
            assert model(images[:0]).shape == small(images[:0]).shape

    def test_a_plan_for_one_image_of_free_strides(self, small, images, assert_right):
        x = images[:1].clone()
        model = optimize(small, x)
        assert_right(model(x.as_strided(x.shape, (7, *x.stride()[1:]))), small, x)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
    def test_another_dtype_is_refused_by_name(self, small, images, dtype, assert_right):
        model = optimize(small, images)
        with pytest.raises(InputMismatch, match=rf"needs a torch\.float16 tensor.*got {dtype}"):
            model(images.to(dtype))
        assert_right(model(images), small, images)

    def test_a_tensor_of_the_host_is_refused_by_name(self, small, images, assert_right):
        model = optimize(small, images)
        with pytest.raises(InputMismatch, match=r"on cuda:0, got torch\.float16 on cpu"):
            model(images.cpu())
        assert_right(model(images), small, images)

    def test_what_is_not_finite_stays_in_its_image(self, small, images):
        model = optimize(small, images)
        images[0, 1, 5, 5] = torch.nan
        found, expected = model(images), small(images)
        assert torch.equal(found.isnan(), expected.isnan())
        assert found[0].isnan().any()
        assert not found[1].isnan().any()

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("plan", ["framework", "hand"])
    def test_more_elements_than_32_bits_count(self, plan, tuned):
        """Over 2^31 of them, the last of which are looked at too."""
        free, _ = torch.cuda.mem_get_info()
        if free < 40 << 30:
            pytest.skip("40 GiB are needed")
        x = torch.empty(1, HUGE, device="cuda", dtype=torch.float16).fill_(-1)
        x[0, -100:] = 2
        x[0, 5] = 3
        found = tuned(Shifted().cuda().half(), x, plan=plan)(x)
        assert float(found[0, -100:].sum()) == 150
        assert float(found[0, :10].sum()) == 2.5
        assert int(found.count_nonzero()) == 101

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("plan", ["framework", "hand"])
    def test_a_module_without_parameters_runs_where_its_input_is(self, images, plan, tuned):
        assert torch.equal(tuned(nn.ReLU(), images, plan=plan)(images), images.relu())


class TestPlaces:
    """Kernels are told where each input and output is, in pointers and in tensor maps."""

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("plan", ["framework", "hand"])
    @torch.no_grad()
    def test_at_each_alignment_that_kernels_take(self, small, images, tuned, plan):
        model = tuned(small, images, plan=plan)
        wanted = model(images)
        room = torch.empty(images.numel() + 4096, dtype=images.dtype, device="cuda")
        for start in (0, 8, 16, 24, 32, 64, 120, 128, 1024, 4088):
            x = room[start : start + images.numel()].view(images.shape)
            x.copy_(images)
            assert torch.equal(model(x), wanted), start
            x.fill_(float("nan"))

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("moved", ["x", "residual"])
    @torch.no_grad()
    def test_a_tensor_map_that_is_encoded_again(self, moved, monkeypatch, tuned):
        """As on a driver whose maps hold more of a tensor's place than its address."""
        monkeypatch.setattr(patches, "_is_address_alone", lambda *_: False)
        layers = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        module = (Added(layers) if moved == "residual" else layers).cuda().half().eval()
        module = module.to(memory_format=torch.channels_last)
        x = torch.randn(8, 64, 32, 32, device="cuda", dtype=torch.float16)
        x = x.contiguous(memory_format=torch.channels_last)
        model = tuned(module, x, plan="hand")
        for _ in range(5):
            x = torch.randn_like(x)
            wanted = module(x).float()
            assert (model(x).float() - wanted).norm() < 0.01 * wanted.norm()


class Added(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x) + x


@torch.no_grad()
def test_the_first_call_of_a_thread(small, images, tuned):
    """It has no CUDA context of its own yet, and the handle of its stream is 0."""
    model = tuned(small, images, plan="hand")
    wanted, found = model(images), []
    model(images)
    other = threading.Thread(target=lambda: found.append(model(images)))
    other.start()
    other.join()
    assert torch.equal(found[0], wanted)


@pytest.mark.usefixtures("planned")
@torch.no_grad()
def test_a_module_that_returns_its_input_too(images, tuned):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3)

        def forward(self, x):
            return self.conv(x), x

    module = Both().cuda().half().eval()
    model = tuned(module, images, plan="hand")
    for _ in range(3):
        x = torch.randn_like(images)
        y, same = model(x)
        assert torch.equal(same, x)
        wanted = module.conv(x).float()
        assert (y.float() - wanted).norm() < 0.01 * wanted.norm()
