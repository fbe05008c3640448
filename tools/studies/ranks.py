"""What a training step of several GPUs takes beside one GPU's, and whether ranks stay equal.

    torchrun --nproc-per-node 2 tools/studies/ranks.py --json study.json
    torchrun --nproc-per-node 2 tools/studies/ranks.py --compile  # and torch.compile, in and around
    torchrun --nproc-per-node 2 tools/studies/ranks.py --one-step  # and gradients beside float64's

se_resnet9_fixup with AdamW, parameters in float32, products in float16 (on a CPU all in float32).
`one` is a TrainStep of each process for itself, `ranks` one of all together, also with all
gradients reduced after the backward pass; torch's rows are DistributedDataParallel with autocast, a
GradScaler and fused AdamW, the last of them around a network that runs from its plan. First, 500
steps of all ranks: the number of parameters that are not equal on all to the bit. Then all ways in
turns, in queues of calls; rank 0 prints one JSON object. --nproc-per-node 1 works, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plantune import LossScale, TrainStep, load_model
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.training.data_parallel import DataParallel
from plantune.training.groups import Group

Runnable = Callable[[], Any]
# So large that no gradient is so small that float16 has less than its 11 bits.
SCALE = 8192.0
OURS_IN_DDP = "DDP around a plan"


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y.float().mean((2, 3)) - target).square().mean()


def randomised(module: nn.Module) -> nn.Module:
    """No weight is 0, as Fixup's first values are."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            spread = torch.randn(p.shape) * p[0].numel() ** -0.5
            p.copy_(spread if p.dim() > 1 else 0.5 + 0.5 * torch.rand(p.shape))
    return module


class Study:
    """The ways of this process."""

    def __init__(self, device: torch.device, images: int) -> None:
        self.device, self.images = device, images
        self.on_gpu = device.type == "cuda"
        numbers = torch.Generator(device).manual_seed(dist.get_rank())
        x = torch.randn(images, 3, 64, 64, generator=numbers, device=device)
        self.x = x.to(memory_format=torch.channels_last) if self.on_gpu else x
        self.target = torch.randn(images, 512, generator=numbers, device=device)

    def adamw(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), 1e-3, fused=self.on_gpu)

    def planned(self, images: int | None = None) -> nn.Module:
        dtypes = {"dtype": torch.float16, "parameters": torch.float32} if self.on_gpu else {}
        module = load_model(
            *("se_resnet9_fixup",),
            **{"batch": images or self.images, "mode": "train", "device": self.device, **dtypes},
            fallback="silent",
        )
        return randomised(module)

    def given(self, x: Tensor) -> Tensor:
        """As a planned module takes images."""
        return x.half() if self.on_gpu else x

    def ours(self, **more: Any) -> tuple[nn.Module, Runnable]:
        module = self.planned()
        step = TrainStep(module, loss, self.adamw(module), scale=LossScale(1024.0), **more)
        x = self.given(self.x)
        return module, lambda: step(x, self.target)

    def torchs(self, *, inside: bool = False, around: bool = False) -> Runnable:
        """DistributedDataParallel, with torch.compile on one side of it or on none."""
        module = self.eager()
        inner: Any = torch.compile(module, mode="reduce-overhead") if inside else module
        wrapped = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        run: Any = torch.compile(wrapped, mode="reduce-overhead") if around else wrapped

        def forward() -> Tensor:
            if inside or around:
                torch.compiler.cudagraph_mark_step_begin()
            with self.casting():
                return loss(run(self.x), self.target)

        return self.stepping(wrapped, forward)

    def wrapped(self) -> Runnable:
        """DistributedDataParallel around a network that runs from its plan."""
        run = DistributedDataParallel(self.planned(), gradient_as_bucket_view=True)
        x = self.given(self.x)
        return self.stepping(run, lambda: loss(run(x), self.target))

    def eager(self) -> nn.Module:
        module = randomised(SEResNet9Fixup(3)).to(self.device)
        return module.to(memory_format=torch.channels_last) if self.on_gpu else module

    def casting(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.float16 if self.on_gpu else torch.bfloat16)

    def stepping(self, module: nn.Module, forward: Callable[[], Tensor]) -> Runnable:
        optimizer, scaler = self.adamw(module), torch.amp.GradScaler(self.device.type)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(forward()).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    def time_ms(self, call: Runnable, calls: int) -> float:
        """Of one call, in a queue of them."""
        self.meet()
        began_s = time.perf_counter()
        for _ in range(calls):
            call()
        self.wait()
        return (time.perf_counter() - began_s) * 1e3 / calls

    def meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.wait()

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def unequal(module: nn.Module) -> int:
    """Parameters that are not rank 0's to the bit, on any rank."""
    count = torch.zeros(1, device=next(module.parameters()).device)
    for parameter in module.parameters():
        own = parameter.detach().contiguous()
        first = own.clone()
        dist.broadcast(first, 0)
        count += float(not torch.equal(own, first))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


@contextmanager
def reduced_at_the_end() -> Iterator[None]:
    """Steps that are made inside do not overlap their backward pass with collectives."""
    own = DataParallel.reducer

    def reducer(self: DataParallel, gradients: Any, device: Any, **given: Any) -> Any:
        return own(self, gradients, device, overlaps=False)

    DataParallel.reducer = reducer  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataParallel.reducer = own  # type: ignore[method-assign]


def updated(study: Study, images: int, x: Tensor, target: Tensor, **more: Any) -> list[Tensor]:
    """What one step of SGD at a rate of 1, in a replay, takes from each parameter: its gradient."""
    module = study.planned(images)
    start = [p.detach().clone() for p in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    step = TrainStep(module, loss, optimizer, scale=LossScale(SCALE), **more)
    for _ in range(3):
        with torch.no_grad():
            for parameter, first in zip(module.parameters(), start, strict=True):
                parameter.copy_(first)
        step(study.given(x), target)
    study.wait()
    pairs = zip(start, module.parameters(), strict=True)
    found = [first.double() - p.detach().double() for first, p in pairs]
    step.close()
    return found


def one_step(study: Study, group: Group) -> dict[str, Any]:
    """Errors of gradients against float64, of all ranks together and of one GPU with all images,
    as parts of eager's on one GPU; and how far these two are apart.
    """
    x, target = whole_batch(study, group)
    together = updated(study, study.images, study.x, study.target, process_group=group)
    alone = updated(study, len(x), x, target)
    eager, wanted = gradients(study, x, target)
    rows = [*zip(together, alone, eager, wanted, strict=True)]
    bounds = [(e - w).norm().clamp_min(2.0**-20 * w.norm()) for _, _, e, w in rows]
    return {
        name: {"worst": max(found), "median": median(found)}
        for name, found in {
            "ranks_of_eagers_error": parts([(t - w).norm() for t, _, _, w in rows], bounds),
            "one_of_eagers_error": parts([(a - w).norm() for _, a, _, w in rows], bounds),
            "apart": parts([(t - a).norm() for t, a, _, _ in rows], [a.norm() for a in alone]),
        }.items()
    }


def parts(tensors: list[Tensor], others: list[Tensor]) -> list[float]:
    return [float(one / other) for one, other in zip(tensors, others, strict=True)]


def whole_batch(study: Study, group: Group) -> list[Tensor]:
    """Images and targets of all ranks."""
    found = []
    for tensor in (study.x, study.target):
        own = tensor.contiguous()
        every = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(every, own)
        found.append(torch.cat(every))
    if study.on_gpu:
        found[0] = found[0].contiguous(memory_format=torch.channels_last)
    return found


def gradients(study: Study, x: Tensor, target: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Eager's and those in float64."""
    eager, exact = study.eager(), study.eager().double()
    with study.casting():
        value = loss(eager(x), target) * SCALE
    value.backward()
    count = max(len(x) // 256, 1)
    for part, of_part in zip(x.chunk(count), target.chunk(count), strict=True):
        ((exact(part.double()).mean((2, 3)) - of_part).square().mean() / count).backward()
    return [p.grad.double() / SCALE for p in eager.parameters()], [
        p.grad for p in exact.parameters()
    ]


def raced(study: Study, ways: dict[str, Runnable], rounds: int, calls: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            times[name].append(study.time_ms(call, calls))
    return {
        name: {"median_ms": median(found), "low_ms": min(found), "high_ms": max(found)}
        for name, found in times.items()
    }


def studied(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    study, group = Study(device, arguments.images), dist.group.WORLD
    ways: dict[str, Runnable] = {}
    if arguments.compile:  # first: it takes longest
        ways["DDP(compile reduce-overhead)"] = study.torchs(inside=True)
        ways["DDP, compile reduce-overhead around"] = study.torchs(around=True)
        for call in ways.values():
            call()
    module, step = study.ours(process_group=group)
    for _ in range(arguments.steps):
        step()
    found: dict[str, Any] = {"steps": arguments.steps, "unequal_parameters": unequal(module)}
    if arguments.one_step:
        found["one_step"] = one_step(study, group)
    ways |= {"one": study.ours()[1], "ranks": step}
    with reduced_at_the_end():
        ways["ranks, reduced at the end"] = study.ours(process_group=group)[1]
    ways["ranks, float16 sent"] = study.ours(process_group=group, reduce_dtype=torch.float16)[1]
    ways |= {"DDP": study.torchs(), OURS_IN_DDP: study.wrapped()}
    for call in ways.values():
        for _ in range(4):
            call()
    found["rows"] = rows = raced(study, ways, arguments.rounds, arguments.calls)
    names = [name for name in rows if name.startswith("DDP") and name != OURS_IN_DDP]
    rivals = [rows[name]["median_ms"] for name in names]
    ours = rows["ranks"]["median_ms"]
    return {**found, "of_one": ours / rows["one"]["median_ms"], "of_best_ddp": ours / min(rivals)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=2048, help="of each rank")
    parser.add_argument("--steps", type=int, default=500, help="before weights are compared")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=30, help="in a round, of each way")
    parser.add_argument("--compile", action="store_true", help="also torch.compile's row")
    parser.add_argument("--one-step", action="store_true", help="also errors of one step")
    parser.add_argument("--json", type=Path, help="where to write what is printed")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if on_gpu else "gloo")
    machine = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    about = {"machine": f"{dist.get_world_size()} x {machine}", "torch": torch.__version__}
    document = {**about, "images": arguments.images, **studied(arguments, device)}
    if dist.get_rank() == 0:
        text = json.dumps(document, indent=1)
        print(text)
        if arguments.json is not None:
            arguments.json.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
