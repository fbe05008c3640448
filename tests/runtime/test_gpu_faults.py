"""What a user does to a tuned module on a GPU: F41 to F52 of the faults, as on the CPU."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import plantune
from plantune import TunedModule, UnplannedCall, optimize
from plantune.environment import arch_of
from plantune.errors import InputMismatch
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.planning import hand_plan
from plantune.runtime.pool import Pool
from plantune.space.search_space import load_search_space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
# More calls than it takes until a graph reads its input where it lies.
CALLS = 20
ROUNDINGS = 8
HUGE = (1 << 31) + 12_345


@pytest.fixture
def small(randomise):
    return randomise(SEResNet9Fixup(3, base_planes=16)).cuda().half()


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64, device="cuda", dtype=torch.float16)


@pytest.fixture
def planned():
    """Fails where a call leaves the plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCall)
        yield


def tuned(module, x, mode="infer", plan="default", **options):
    """`module` optimized with the default plan, or with the one picked by hand."""
    model = optimize(module, x, mode=mode, **options)
    if plan == "default":
        return model
    space = load_search_space(arch_of(torch.device("cuda")))
    picked = hand_plan(model.pool().graph, space, network="by hand")
    return optimize(module, x, mode=mode, plan=picked, **options)


def off(found, wanted):
    """The error as a part of the whole."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@torch.no_grad()
def assert_right(found, module, x):
    """By the bound that every kernel is held to."""
    exact = copy.deepcopy(module).double()(x.double())
    allowed = 2 * off(module(x), exact) + ROUNDINGS * torch.finfo(x.dtype).eps
    assert off(found.detach(), exact) <= allowed


def gradients(module, x, dy):
    module.zero_grad()
    module(x).backward(dy)
    return [p.grad.clone() for p in module.parameters()]


def assert_trains(model, module, x):
    """Its gradients err no more than twice as much as the framework's."""
    dy = torch.randn_like(module(x)) / 8
    exact = gradients(copy.deepcopy(module).double(), x.double(), dy.double())
    theirs = [off(*pair) for pair in zip(gradients(module, x, dy), exact, strict=True)]
    ours = [off(*pair) for pair in zip(gradients(model, x, dy), exact, strict=True)]
    assert max(ours) <= 2 * max(theirs) + ROUNDINGS * torch.finfo(x.dtype).eps


class TestOtherShapes:
    """F41."""

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

    def test_fallback_error_refuses_it_and_stays_usable(self, small, images):
        model = optimize(small, images, fallback="error")
        with pytest.raises(InputMismatch, match=r"got \(3, 3, 64, 64\)"):
            model(torch.cat([images, images])[:3])
        assert_right(model(images), small, images)

    @pytest.mark.usefixtures("planned")
    def test_channels_last(self, small, images):
        last = images.contiguous(memory_format=torch.channels_last)
        for example in (images, last):
            model = optimize(small, example)
            for x in (images, last):
                assert_right(model(x), small, images)


def with_offset(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


AWKWARD = {
    "sliced batch": lambda x: torch.cat([x, x + 1])[1:3],
    "every second": lambda x: torch.cat([x, x + 1])[::2],
    "sliced channels": lambda x: torch.cat([x, x], 1)[:, 1:4],
    "strided": lambda x: torch.cat([x, x], 3)[..., 1::2],
    "expanded batch": lambda x: x[:1].expand(2, -1, -1, -1),
    "expanded channels": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "transposed": lambda x: x.transpose(2, 3),
    "permuted": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "misaligned": with_offset,
    "a parameter": nn.Parameter,
}


class TestAwkwardInputs:
    """F42."""

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("plan", ["default", "hand"])
    @pytest.mark.parametrize("awkward", AWKWARD)
    def test_a_view_is_read_right_and_never_written(self, small, images, awkward, plan):
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

    def test_a_plan_for_one_image_of_free_strides(self, small, images):
        x = images[:1].clone()
        model = optimize(small, x)
        assert_right(model(x.as_strided(x.shape, (7, *x.stride()[1:]))), small, x)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
    def test_another_dtype_is_refused_by_name(self, small, images, dtype):
        model = optimize(small, images)
        with pytest.raises(InputMismatch, match=rf"needs a torch\.float16 tensor.*got {dtype}"):
            model(images.to(dtype))
        assert_right(model(images), small, images)

    def test_a_tensor_of_the_host_is_refused_by_name(self, small, images):
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

    @pytest.mark.parametrize("plan", ["default", "hand"])
    def test_more_elements_than_32_bits_count(self, plan):
        """Over 2^31 of them, the last of which are looked at too."""
        free, _ = torch.cuda.mem_get_info()
        if free < 40 << 30:
            pytest.skip("40 GiB are needed")
        x = torch.empty(1, HUGE, device="cuda", dtype=torch.float16).fill_(-1)
        x[0, -100:] = 2
        x[0, 5] = 3
        model = tuned(nn.ReLU(), x, plan=plan)
        found = model(x)
        assert float(found[0, -100:].sum()) == 200
        assert float(found[0, :10].sum()) == 3
        assert int(found.count_nonzero()) == 101


class TestConversions:
    """F44."""

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
    def test_there_and_back_again(self, small, images, mode):
        model = optimize(small, images, mode=mode)
        model(images)
        model.cpu().float().half().cuda()
        assert_right(model(images), small, images)
        if mode == "train":
            assert_trains(model, small, images)

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_has_all_and_shares_nothing(self, small, images, how):
        model = optimize(small, images, mode="train")
        model(images).sum().backward()
        model.zero_grad()
        duplicate = {
            "deepcopy": copy.deepcopy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
            "torch.save": through_a_file,
        }[how]
        other = duplicate(model)
        assert type(other) is TunedModule
        assert_trains(other, small, images)
        addresses = [{p.data_ptr() for p in m.parameters()} for m in (model, other)]
        assert addresses[0].isdisjoint(addresses[1])
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        assert_right(other(images), other.reference, images)
        assert_right(model(images), small, images)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_torch_compile_round_it(self, small, images, backend):
        torch._dynamo.reset()
        model = optimize(small, images, mode="train")
        compiled = torch.compile(model, backend=backend)
        for step in range(3):
            x = images + step
            assert_right(compiled(x), small, x)
        assert_trains(compiled, small, images)

    def test_distributed_data_parallel(self, small, images, tmp_path):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
        )
        try:
            wrapped = nn.parallel.DistributedDataParallel(optimize(small, images, mode="train"))
            assert_trains(wrapped, small, images)
        finally:
            torch.distributed.destroy_process_group()

    @pytest.mark.usefixtures("planned")
    def test_a_part_of_a_larger_module(self, small, images):
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


class Normed(nn.Sequential):
    """Moves its statistics in every pass."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


class TestCapture:
    """F45 and F46."""

    @pytest.mark.usefixtures("planned")
    def test_beside_a_thread_that_uses_the_gpu(self, small, images):
        stop, errors = threading.Event(), []

        def work():
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    while not stop.is_set():
                        # No random numbers: torch refuses them beside any capture.
                        a = torch.ones(300, 300, device="cuda")
                        (a @ a).sum().item()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(5):
                assert_right(optimize(small, images)(images), small, images)
        finally:
            stop.set()
            thread.join()
        assert errors == []

    @pytest.mark.usefixtures("planned")
    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_the_first_calls_of_several_threads(self, small, images, mode):
        models = [optimize(small, images, mode=mode) for _ in range(4)]
        found, start = [None] * 4, threading.Barrier(4)
        torch.cuda.synchronize()

        def first(index):
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                found[index] = models[index % 3](images).detach()
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=first, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in found:
            assert_right(result, small, images)

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_one_that_fails_changes_nothing(self, images, monkeypatch, mode):
        module = Normed().cuda().half().train(mode == "train")
        model, other = optimize(module, images, mode=mode), copy.deepcopy(module)
        before = torch.cuda.current_stream()
        lease = Pool.lease

        def broken(pool):
            held = lease(pool)
            program = held.instance.program._program
            run = program.run_forward

            def run_and_wait():
                run()
                images.sum().item()  # Waits for the GPU, which no capture allows.

            monkeypatch.setattr(program, "run_forward", run_and_wait)
            return held

        with monkeypatch.context() as patch:
            patch.setattr(Pool, "lease", broken)
            with pytest.warns(UnplannedCall, match="the plan cannot run"):
                found = model(images)
        assert torch.cuda.current_stream() == before
        assert torch.randn(5, device="cuda").any()
        torch.cuda.empty_cache()
        assert torch.equal(found, other(images))
        for (name, ours), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnplannedCall)
            assert off(model(images), other(images)) < 4e-3
        for (name, ours), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=1e-2, atol=1e-3), name

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_a_full_gpu_costs_the_plan_alone(self, small, images, mode):
        """F35: until there is room again."""
        model = optimize(small, images, mode=mode, fallback="silent")
        small(images)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(allowed)
        try:
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            pytest.fail("it is not full")
        except torch.OutOfMemoryError:
            pass
        try:
            model(images)
        except torch.OutOfMemoryError:
            pass  # Not even the framework has room, which is what eager would say.
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        model._fallback = "error"
        assert_right(model(images), small, images)


class TestMixedPrecision:
    """F48."""

    def test_autocast_runs_through_the_framework(self, randomise):
        module = randomise(SEResNet9Fixup(3, base_planes=16)).cuda()
        x = torch.randn(2, 3, 64, 64, device="cuda")
        model = optimize(module, x)
        model(x)
        with torch.autocast("cuda", torch.float16):
            with pytest.warns(UnplannedCall, match="autocast is on"):
                found = model(x)
            assert found.dtype == module(x).dtype
            assert off(found, module(x)) < 4e-3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)

    def test_an_overflow_is_found_and_a_smaller_scale_learns(self, randomise):
        module = randomise(SEResNet9Fixup(3, base_planes=16)).cuda()
        x = torch.randn(2, 3, 64, 64, device="cuda")
        model = optimize(module, x, mode="train", fallback="error")
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**127, growth_interval=1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = [p.detach().clone() for p in model.parameters()]
        scales = []
        for _ in range(40):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if len(scales) == 1:
                assert all(map(torch.equal, before, model.parameters())), "skipped"
        assert scales[0] < 2.0**127
        assert scales[-1] == scales[-2]
        assert not any(map(torch.equal, before, model.parameters()))
        assert all(bool(p.isfinite().all()) for p in model.parameters())


class TestThreads:
    """F49."""

    @pytest.mark.usefixtures("planned")
    def test_first_calls_of_threads_that_never_used_the_gpu(self, small, images):
        model = tuned(small, images, plan="hand")
        expected = model(images)
        torch.cuda.synchronize()
        held = [model.pool().lease() for _ in range(2)]  # Each thread makes an instance of its own.
        found = []

        def call():
            found.append(model(images))
            torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 2
        assert [off(result, expected) < 4e-3 for result in found] == [True, True]

    @pytest.mark.usefixtures("planned")
    def test_training(self, small, images):
        model = optimize(small, images, mode="train")
        parameters = list(model.parameters())
        inputs = [torch.randn_like(images) for _ in range(3)]

        def grads(x):
            return torch.autograd.grad(model(x).float().square().sum(), parameters)

        expected, wrong = [grads(x) for x in inputs], []
        torch.cuda.synchronize()

        def work(index):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    found = grads(inputs[index])
                    torch.cuda.current_stream().synchronize()
                    wrong.extend(
                        index
                        for a, b in zip(found, expected[index], strict=True)
                        if off(a, b) > 0.01
                    )

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestCollection:
    """F51."""

    def test_a_live_graph_survives_the_collector(self, small, images):
        model = optimize(small, images, mode="train")
        losses = [model(images + i).float().square().sum() for i in range(3)]
        gc.collect()
        torch.cuda.empty_cache()
        with torch.no_grad():
            model(images * 9)
        parameters = list(model.parameters())
        for i, loss in enumerate(losses):
            found = torch.autograd.grad(loss, parameters)
            again = torch.autograd.grad(model(images + i).float().square().sum(), parameters)
            for ours, theirs in zip(found, again, strict=True):
                assert off(ours, theirs) < 0.01

    def test_a_dropped_module_gives_its_memory_back(self, small, images):
        held = []
        for _ in range(4):
            model = optimize(small, images, mode="train")
            model(images).float().sum().backward()
            del model
            gc.collect()
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
        assert held[-1] <= held[0]


PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(plantune.__file__).resolve().parents[1])!r})
import torch
from plantune import optimize
from plantune.models.se_resnet9 import SEResNet9Fixup
x = torch.randn(2, 3, 64, 64, device="cuda", dtype=torch.float16)
model = optimize(SEResNet9Fixup(3, 16).cuda().half(), x, mode="train")
"""
ALIVE = {
    "graphs, a cycle, in torch itself": """
kept = [model(x).sum() for _ in range(3)]
kept[0].backward(retain_graph=True)
kept[1].cycle = kept
torch.kept = [model(x), model]
""",
    "the caller's own capture": """
model.eval()
with torch.no_grad():
    model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
graph.replay()
""",
    "backward at exit": """
import atexit
atexit.register(lambda y=model(x): y.sum().backward())
""",
    "a thread at work": """
import threading
threading.Thread(target=lambda: [model(x).sum().backward() for _ in range(50)]).start()
""",
    "an error": "model(x)\nraise SystemExit(0)",
}


class TestExit:
    """F52: the interpreter ends quietly, whatever is alive."""

    @pytest.mark.parametrize("alive", ALIVE)
    def test_with_live_graphs(self, alive, python):
        done = python(PRELUDE + ALIVE[alive])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
