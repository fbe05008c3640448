from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.base.tolerances import tolerance
from plantune.errors import IllegalCandidate, WrongResult
from plantune.graph.types import TensorType
from plantune.kernels.family import Binding, Candidate
from plantune.measure.numerics import Numerics, check

from .conftest import IMAGE, caught, output

FLOATS = ("float64", "float32", "bfloat16")


def test_a_right_kernel_passes(relu, fake, check_fake):
    report = check_fake(relu, fake(lambda step, frame: None))
    assert report == Numerics(0.0, report.bound, True)
    assert 0 < report.bound <= 4e-6


def test_one_element_off_by_a_hundredth(relu, fake, check_fake):
    def twist(step, frame):
        largest = int(output(step, frame).view(-1).argmax())
        output(step, frame).view(-1)[largest] *= 1.01

    message = caught(check_fake, relu, fake(twist))
    assert message.startswith("fake {} at step 'relu' (relu), first run: 'relu'[")
    assert "relative error 0.0" in message


def test_the_error_says_how_much_is_allowed(relu, fake, check_fake):
    with pytest.raises(WrongResult) as caught:
        check_fake(relu, fake(lambda step, frame: output(step, frame).mul_(1.5)))
    assert caught.value.error == pytest.approx(0.5)
    assert caught.value.bound < 1e-5


def test_an_element_that_is_not_written(relu, fake, check_fake):
    def twist(step, frame):
        output(step, frame)[1, 2, 3, 4] = torch.nan

    message = caught(check_fake, relu, fake(twist))
    assert "first run: 'relu'[1, 2, 3, 4] is nan instead of" in message


def test_what_an_output_held_before_does_not_count(step_of, fake, check_fake):
    """Not even for a kernel whose comparisons pass over NaN."""

    class Larger(fake):
        def bind(self, parts, config, frame):
            step = parts.step

            def launch(stream):
                ((name, _),) = step.outputs
                y = frame.values[name]
                known = step.evaluate({name: frame.values[name] for name, _ in step.inputs})
                torch.fmax(y, known[name], out=y)

            return Binding(launch)

    shifted = step_of(
        lambda b: b.emit(
            "add_channel", b.input("x", IMAGE), b.parameter("bias", TensorType((3,))), axis=1
        )
    )
    assert "second run on the same data" in caught(check_fake, shifted, Larger(None))


@pytest.mark.parametrize("place", [-1, 2 * 3 * 5 * 7])
def test_a_write_outside_of_the_output(relu, fake, check_fake, place):
    def twist(step, frame):
        y = output(step, frame)
        y.as_strided((1,), (1,), y.storage_offset() + place).fill_(1.0)

    assert "first run: it wrote outside of 'relu'" in caught(check_fake, relu, fake(twist))


def test_a_write_outside_of_the_workspace(relu, fake, check_fake):
    def twist(step, frame):
        memory = frame.workspace
        memory.as_strided((1,), (1,), memory.storage_offset() + 64).fill_(1)

    message = caught(check_fake, relu, fake(twist, workspace=64))
    assert "it wrote outside of 'workspace of relu'" in message


def test_a_write_outside_of_an_input(relu, fake, check_fake):
    def twist(step, frame):
        x = frame.values["x"]
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0.0)

    assert "it wrote outside of 'x'" in caught(check_fake, relu, fake(twist))


def test_a_write_to_an_input(relu, fake, check_fake):
    message = caught(check_fake, relu, fake(lambda step, frame: frame.values["x"].relu_()))
    assert "first run: it wrote to its input 'x'" in message


def test_a_read_beyond_an_input(relu, fake, check_fake):
    def twist(step, frame):
        x = frame.values["x"]
        beyond = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
        output(step, frame).add_(beyond)

    message = caught(check_fake, relu, fake(twist))
    assert "second run on the same data" in message
    assert "is nan instead of" in message


def test_a_lost_nan(relu, fake, check_fake):
    def twist(step, frame):
        x = frame.values["x"]
        output(step, frame).copy_(torch.where(x > 0, x, 0))

    message = caught(check_fake, relu, fake(twist))
    assert "run with nan in one element of 'x'" in message
    assert "is 0: NaN or infinity is lost" in message


def test_a_lost_infinity(relu, fake, check_fake):
    message = caught(
        check_fake, relu, fake(lambda step, frame: output(step, frame).clamp_(max=1e30))
    )
    assert "run with inf in one element of 'x'" in message


def test_a_nan_that_is_lost_from_a_weight(step_of, fake, check_fake):
    def emit(b):
        x = b.input("x", TensorType((2, 3)))
        w = b.parameter("w", TensorType((4, 3)))
        return b.emit("matmul", x, w, transpose_a=False, transpose_b=True)

    def twist(step, frame):
        x, w = (frame.values[name] for name in "xw")
        output(step, frame).copy_(x @ w.nan_to_num(0).T)

    message = caught(check_fake, step_of(emit), fake(twist))
    assert "run with nan in one element of 'w'" in message
    assert "NaN or infinity is lost" in message


def test_a_stale_workspace(relu, fake, check_fake):
    """A kernel that fills its workspace in the first launch only."""

    def twist(step, frame):
        kept = frame.workspace.view(torch.float32).view(IMAGE.shape)
        if kept.isnan().all():
            kept.copy_(output(step, frame))
        output(step, frame).copy_(kept)

    message = caught(check_fake, relu, fake(twist, workspace=IMAGE.size_bytes))
    assert "run on other data: 'relu'[" in message


def test_a_workspace_that_must_be_zero_first(relu, fake, check_fake):
    def twist(step, frame):
        output(step, frame).add_(frame.workspace.view(torch.float32))

    assert "first run: 'relu'[" in caught(check_fake, relu, fake(twist, workspace=4))


def test_inputs_are_read_at_each_launch(relu, fake, check_fake):
    """A kernel that keeps the tensor of the first launch instead of looking it up again."""
    kept = []

    def twist(step, frame):
        kept.append(frame.values["x"])
        output(step, frame).copy_(kept[0].relu())

    assert "run on other data: 'relu'[" in caught(check_fake, relu, fake(twist))


def test_constants_are_read_at_each_refresh(biased, fake, check_fake):
    kept = []

    def twist(step, frame):
        kept.append(frame.values["bias"].clone())
        shifted = frame.values["x"] + kept[0].view(1, -1, 1, 1)
        output(step, frame).copy_(shifted.relu())

    assert "run on other weights: 'relu'[" in caught(check_fake, biased, fake(twist))


def test_a_refresh_may_not_read_what_comes_with_each_call(biased, fake, check_fake):
    class Early(fake):
        def bind(self, parts, config, frame):
            def refresh():
                frame.values["x"].sum()

            return Binding(super().bind(parts, config, frame).launch, refresh)

    with pytest.raises(KeyError, match="x"):
        check_fake(biased, Early(lambda step, frame: None))


def test_a_kernel_that_is_not_deterministic(relu, fake, check_fake):
    noise = torch.Generator().manual_seed(0)

    def twist(step, frame):
        y = output(step, frame)
        y.mul_(1 + 3e-7 * torch.rand(y.shape, generator=noise))

    report = check_fake(relu, fake(twist))
    assert not report.deterministic
    assert 0 < report.error <= report.bound


def adopting(fake, make):
    """A family whose outputs are what `make(x)` returns."""

    class Adopting(fake):
        def adopts(self, step, config):
            return frozenset(("relu",))

        def bind(self, parts, config, frame):
            return Binding(lambda stream: frame.values.update(relu=make(frame.values["x"])))

    return Adopting(lambda step, frame: None)


def test_an_adopted_output_in_the_memory_of_an_input(relu, fake, check_fake):
    def make(x):
        return x if not (x < 0).any() and not x.isnan().any() else x.as_strided(x.shape, x.stride())

    message = caught(check_fake, relu, adopting(fake, make))
    assert "output 'relu' is not in new memory of its own" in message


def test_an_adopted_output_that_the_next_launch_overwrites(relu, fake, check_fake):
    memory = torch.empty(IMAGE.shape)
    message = caught(check_fake, relu, adopting(fake, lambda x: torch.clamp_min(x, 0, out=memory)))
    assert "second run on the same data: output 'relu' is not in new memory" in message


def test_an_adopted_output_in_another_layout(relu, fake, check_fake):
    message = caught(
        check_fake,
        relu,
        adopting(fake, lambda x: x.relu().contiguous(memory_format=torch.channels_last)),
    )
    assert "output 'relu' is not nchw: strides (105, 1, 21, 3)" in message


def test_an_adopted_output_of_another_type(relu, fake, check_fake):
    message = caught(check_fake, relu, adopting(fake, lambda x: x.relu().double()))
    assert "output 'relu' has torch.Size([2, 3, 5, 7]), torch.float64" in message


def test_an_output_that_is_replaced_instead_of_written(relu, fake, check_fake):
    def twist(step, frame):
        frame.values["relu"] = frame.values["relu"].clone()

    message = caught(check_fake, relu, fake(twist))
    assert "output 'relu' was replaced instead of written" in message


def test_a_view_that_is_a_copy(step_of, fake, check_fake):
    class Copying(fake):
        def aliases(self, step, config):
            return {"reshape": "x"}

        def bind(self, parts, config, frame):
            def launch(stream):
                frame.values["reshape"] = frame.values["x"].reshape(6, 35).clone()

            return Binding(launch)

    step = step_of(lambda b: b.emit("reshape", b.input("x", IMAGE), shape=(6, 35)))
    message = caught(check_fake, step, Copying(lambda step, frame: None))
    assert "output 'reshape' is not a view of 'x'" in message


def test_an_output_that_is_not_made(relu, fake, check_fake):
    class Idle(fake):
        def adopts(self, step, config):
            return frozenset(("relu",))

        def bind(self, parts, config, frame):
            return Binding(lambda stream: None)

    message = caught(check_fake, relu, Idle(lambda step, frame: None))
    assert "output 'relu' was not made" in message


def test_an_illegal_candidate_is_not_run(relu, space):
    with pytest.raises(IllegalCandidate, match="onednn_conv at step 'relu': the step starts with"):
        check(relu, Candidate("onednn_conv", Attrs(layout="nchw", prepack=True)), space)


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_dtypes(step_of, space, dtype):
    def emit(b):
        x = b.input("x", TensorType((2, 4, 6, 6), dtype))
        w = b.parameter("w", TensorType((8, 4, 3, 3), dtype))
        bias = b.parameter("bias", TensorType((1,), dtype))
        geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
        (y,) = b.emit("conv2d", x, w, **geometry)
        return b.emit("relu", *b.emit("add", y, bias))

    step = step_of(emit)
    candidate = Candidate("framework", Attrs(layout="nchw"))
    report = check(step, candidate, space)
    allowed = tolerance("step", dtype)
    assert allowed <= report.bound < 12 * allowed
    assert report.error <= report.bound


@pytest.mark.parametrize("dtype", FLOATS)
def test_twice_what_pytorch_errs_is_wrong(step_of, fake, check_fake, dtype):
    """In every dtype an error of five tolerances is seen."""
    step = step_of(lambda b: b.emit("relu", b.input("x", TensorType((64, 64), dtype))))

    def twist(step, frame):
        y = output(step, frame)
        y.mul_(1 + 5 * tolerance("step", dtype))

    assert "first run" in caught(check_fake, step, fake(twist))


def test_a_counter_is_exact(step_of, space, fake, check_fake):
    count = TensorType((), "int64")
    step = step_of(lambda b: b.emit("affine", b.buffer("count", count), alpha=1, beta=1))
    for layout in ("nchw", "nhwc"):
        report = check(step, Candidate("framework", Attrs(layout=layout)), space)
        assert (report.error, report.bound, report.deterministic) == (0, 0, True)
    message = caught(check_fake, step, fake(lambda step, frame: output(step, frame).add_(1)))
    assert "'affine'[] is" in message


def test_indices_are_exact(step_of, fake, check_fake):
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    image = TensorType((2, 3, 6, 6))
    step = step_of(lambda b: b.emit("max_pool2d", b.input("x", image), **window))

    def twist(step, frame):
        frame.values["max_pool2d:1"].view(-1)[3] += 1

    assert "'max_pool2d:1'[0, 0, 1, 0] is" in caught(check_fake, step, fake(twist))


def test_what_overflows_in_pytorch_may_overflow(step_of, fake, check_fake):
    def emit(b):
        x = b.input("x", TensorType((2, 3), "float16"))
        return b.emit("add", x, x)

    assert check_fake(step_of(emit), fake(lambda step, frame: None)).deterministic
