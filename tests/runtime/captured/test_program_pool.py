"""Instances under errors, threads and the collector."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from plantune.kernels.families.framework import Framework
from plantune.kernels.family import Binding
from plantune.runtime.captured import program_pool as pool_module

CALLS = 30


@pytest.fixture
def failing(monkeypatch):
    """A set of (phase, op): the framework's kernel of such a step raises while it is in there."""
    faults: set[tuple[str, str]] = set()
    bind = Framework.bind

    def bind_with_faults(self, parts, config, frame):
        binding = bind(self, parts, config, frame)

        def launch(stream):
            if (parts.step.phase, parts.step.ops[0]) in faults:
                raise RuntimeError("the kernel failed")
            binding.launch(stream)

        return Binding(launch, binding.refresh)

    monkeypatch.setattr(Framework, "bind", bind_with_faults)
    return faults


@pytest.fixture
def made(monkeypatch):
    """Every instance that is made."""
    instances = []
    init = pool_module.Instance.__init__

    def init_and_note(self, *args):
        init(self, *args)
        instances.append(1)

    monkeypatch.setattr(pool_module.Instance, "__init__", init_and_note)
    return instances


class TestErrorsInAPass:
    """What raised in the middle leaves nothing behind."""

    def test_in_forward(self, failing, small, images, tuned, close):
        model = tuned(small, images)
        before = model(images)
        failing.add(("forward", "sigmoid"))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="the kernel failed"):
                model(images + 1)
        failing.clear()
        assert torch.equal(model(images), before)
        close(model(images), small(images))

    @pytest.mark.parametrize("fault", [("forward", "sigmoid"), ("backward", "sigmoid_grad")])
    def test_in_training(self, fault, failing, small, images, tuned, results, close):
        model = tuned(small, images, "train")
        expected = results(small, images, wrt_input=True)
        for step in range(3):
            if step == 1:
                failing.add(fault)
                with pytest.raises(RuntimeError, match="the kernel failed"):
                    results(model, images * 2, wrt_input=True)
                failing.clear()
            for name, value in results(model, images, wrt_input=True).items():
                close(value, expected[name])

    def test_a_failed_backward_is_given_up(self, failing, made, small, images, tuned, results):
        model = tuned(small, images, "train")
        y = model(images).sum()
        failing.add(("backward", "sigmoid_grad"))
        with pytest.raises(RuntimeError, match="the kernel failed"):
            y.backward()
        failing.clear()
        with pytest.raises(RuntimeError, match="run forward again"):
            y.backward()
        del y
        gc.collect()
        results(model, images)
        assert len(made) == 2, "what the failed instance holds is not known"

    def test_statistics_move_in_whole_passes_only(self, failing, named, images, tuned):
        module = named(
            first=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), act=nn.Sigmoid(), last=nn.ReLU()
        )
        model = tuned(module, images, "train")
        model(images)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        failing.add(("forward", "relu"))
        with pytest.raises(RuntimeError, match="the kernel failed"):
            model(images)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_while_weights_are_prepared(self, monkeypatch, small, images, tuned, close):
        model = tuned(small, images, plan="hand")
        model(images)
        with torch.no_grad():
            model.layers[0][0].conv1.weight.mul_(2)
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.mkldnn, "_reorder_convolution_weight", None)
            with pytest.raises(TypeError):
                model(images)
        with torch.no_grad():
            close(model(images), model.reference(images))


def in_threads(count, work):
    """Runs `work(thread, call)` in every thread at once, and returns the results by thread."""
    found = [[] for _ in range(count)]
    errors = []
    start = threading.Barrier(count)

    def run(thread):
        try:
            start.wait()
            for call in range(CALLS):
                found[thread].append(work(thread, call))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return found


@pytest.fixture
def restless():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
class TestThreads:
    """Several threads on one module get what one thread alone gets."""

    @pytest.fixture
    def inputs(self):
        return [torch.randn(2, 3, 32, 32) for _ in range(4)]

    @pytest.mark.parametrize("count", [2, 4])
    def test_inference(self, count, plan, small, inputs, tuned):
        model = tuned(small, inputs[0], plan=plan)
        expected = [*map(tuned(small, inputs[0], plan=plan), inputs)]
        found = in_threads(count, lambda thread, call: model(inputs[thread]))
        for thread in range(count):
            assert all(torch.equal(y, expected[thread]) for y in found[thread])

    @pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4])
    def test_training(self, count, plan, small, inputs, tuned):
        def gradients(model, x):
            return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

        model = tuned(small, inputs[0], "train", plan)
        alone = tuned(small, inputs[0], "train", plan)
        expected = [gradients(alone, x) for x in inputs]
        found = in_threads(count, lambda thread, call: gradients(model, inputs[thread]))
        for thread in range(count):
            for got in found[thread]:
                assert all(map(torch.equal, got, expected[thread]))

    def test_a_backward_pass_in_another_thread(self, small, inputs, tuned, close):
        model = tuned(small, inputs[0], "train")
        losses = [model(x).square().sum() for x in inputs]
        parameters = list(model.parameters())
        found = [None] * len(losses)

        def backward(index):
            found[index] = torch.autograd.grad(losses[index], parameters)

        threads = [threading.Thread(target=backward, args=(i,)) for i in range(len(losses))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for x, got in zip(inputs, found, strict=True):
            loss = small(x).square().sum()
            for ours, theirs in zip(
                got, torch.autograd.grad(loss, list(small.parameters())), strict=True
            ):
                close(ours, theirs)

    def test_some_infer_while_some_train(self, small, inputs, tuned):
        model = tuned(small, inputs[0], "train")
        with torch.no_grad():
            values = [*map(tuned(small, inputs[0], "train"), inputs)]

        def work(thread, call):
            if thread % 2:
                with torch.no_grad():
                    return model(inputs[thread])
            y = model(inputs[thread])
            y.sum().backward(inputs=[model.stem[1].weight] if thread == 0 else None)
            return y.detach()

        found = in_threads(3, work)
        for thread in range(3):
            assert all(torch.equal(y, values[thread]) for y in found[thread])

    def test_the_first_call_of_all_at_once(self, small, inputs, tuned):
        expected = [*map(tuned(small, inputs[0], "train"), inputs)]
        for _ in range(5):
            model = tuned(small, inputs[0], "train")
            found = [None] * 4
            start = threading.Barrier(4)

            def first(index, model=model, found=found, start=start):
                start.wait()
                found[index] = model(inputs[index])

            threads = [threading.Thread(target=first, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(map(torch.equal, found, expected))


class TestCollection:
    """Memory goes back when nobody can use the graph any more, and not before."""

    def test_a_live_graph_survives_the_collector(self, small, images, tuned, results, close):
        model = tuned(small, images, "train")
        parameters = list(model.parameters())
        losses = [model(images + i).square().sum() for i in range(3)]
        for _ in range(3):
            gc.collect()
            with torch.no_grad():
                model(images * 9)
            model(images * 7)
        for i, loss in enumerate(losses):
            gc.collect()
            expected = torch.autograd.grad(
                small(images + i).square().sum(), list(small.parameters())
            )
            for ours, theirs in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
                close(ours, theirs)

    def test_a_graph_survives_its_module(self, small, images, tuned, close):
        model = tuned(small, images, "train")
        weight = model.stem[1].weight
        loss = model(images).sum()
        del model
        gc.collect()
        loss.backward()
        small(images).sum().backward()
        close(weight.grad, small.stem[1].weight.grad)

    @pytest.mark.parametrize("end", ["backward", "dropped", "kept, then dropped"])
    def test_one_instance_serves_passes_that_do_not_overlap(self, end, made, small, images, tuned):
        model = tuned(small, images, "train")
        for _ in range(5):
            loss = model(images).sum()
            if end != "dropped":
                loss.backward(retain_graph=end != "backward")
            del loss
            gc.collect()
        assert len(made) == 1

    def test_backward_itself_gives_the_instance_back(self, made, small, images, tuned):
        model = tuned(small, images, "train")
        kept = []
        for _ in range(5):
            kept.append(model(images))
            kept[-1].sum().backward()
        assert len(made) == 1
        assert all(torch.equal(y, kept[0]) for y in kept)

    @pytest.mark.parametrize("end", ["refreshed", "dropped"])
    def test_programs_end_without_the_collector(self, end, small, images, tuned):
        """It comes by chance; until then others took as much of a GPU's memory again."""
        model = tuned(small, images, "train")
        gc.collect()
        gc.disable()
        try:
            model(images).sum().backward()
            with torch.no_grad():
                model(images)
            programs = [*map(weakref.ref, model._calls.programs())]
            if end == "refreshed":
                for _ in range(2):  # the first one keeps them
                    model.refresh()
            else:
                del model
            assert len(programs) == 2
            assert not any(program() for program in programs)
        finally:
            gc.enable()

    def test_a_dropped_module_is_freed(self, small, images, tuned):
        model = tuned(small, images, "train")
        model(images).sum().backward()
        alive = weakref.ref(model.reference)
        del model
        gc.collect()
        assert alive() is None


PRELUDE = """
import torch
from plantune import optimize
from plantune.models.se_resnet9 import SEResNet9Fixup
x = torch.randn(2, 3, 64, 64)
model = optimize(SEResNet9Fixup(3, 16), x, mode="train")
"""


class TestExit:
    """The interpreter ends quietly, whatever is alive."""

    @pytest.mark.parametrize(
        "alive",
        [
            "kept = [model(x).sum() for _ in range(3)]\n"
            "kept[0].backward(retain_graph=True)\n"
            "kept[1].cycle = kept\n"
            "torch.kept = [model(x), model]\n"
            "import atexit\natexit.register(lambda y=model(x): y.sum().backward())",
            "import threading\n"
            "t = threading.Thread(target=lambda: [model(x).sum().backward() for _ in range(50)])\n"
            "t.start()",
        ],
        ids=["graphs, a cycle, in torch itself, backward at exit", "a thread at work"],
    )
    def test_with_live_graphs(self, alive, python):
        done = python(PRELUDE + alive)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_with_a_daemon_that_waits_after_a_pass(self, python):
        """One inside of torch aborts the process, in eager and with a plan: 12 of 12 times each."""
        done = python(
            PRELUDE
            + "import threading\n"
            + "passed, never = threading.Event(), threading.Event()\n"
            + "def work():\n"
            + "    kept = model(x).sum()\n"
            + "    kept.backward()\n"
            + "    passed.set()\n"
            + "    never.wait()\n"
            + "threading.Thread(target=work, daemon=True).start()\n"
            + "passed.wait()"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_capture_takes_no_instance_that_another_thread_has_taken(
    monkeypatch, small, images, tuned
):
    """Calls take idle instances without a lock, so one may go while a capture looks at it."""
    model = tuned(small, images)
    pool = model.pool()
    first, second = pool.lend(), pool.lend()
    for loan in (first, second):
        loan.instance.forward(images)
        loan.release()
    taken = []
    is_due = pool_module.Instance.is_due

    def is_due_while_a_call_begins(instance):
        if not taken:
            taken.append(pool._idle.pop(pool._idle.index(instance)))
        return is_due(instance)

    monkeypatch.setattr(pool_module.Instance, "is_due", is_due_while_a_call_begins)
    captured = pool._lend_in((1, 0))
    assert len(taken) == 1
    assert captured.instance is not taken[0]
