"""What a training step of several GPUs takes beside one GPU's, and whether ranks stay equal.

    torchrun --nproc-per-node 2 tools/ranks_study.py --json study.json
    torchrun --nproc-per-node 2 tools/ranks_study.py --compile  # and DDP(torch.compile)

se_resnet9_fixup with AdamW, parameters in float32, products in float16 (on a CPU all in float32).
`one` is a TrainStep of each process for itself, `ranks` one of all together; torch's rows are
DistributedDataParallel with autocast, a GradScaler and fused AdamW. First, 500 steps of all ranks:
the number of parameters that are not equal on all to the bit. Then all ways in turns, in queues of
calls; rank 0 prints one JSON object. --nproc-per-node 1 works, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plantune import LossScale, TrainStep, load_model
from plantune.models.se_resnet9 import SEResNet9Fixup

Call = Callable[[], Any]


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

    def ours(self, **more: Any) -> tuple[nn.Module, Call]:
        dtypes = {"dtype": torch.float16, "parameters": torch.float32} if self.on_gpu else {}
        module = load_model(
            *("se_resnet9_fixup",),
            **{"batch": self.images, "mode": "train", "device": self.device, **dtypes},
            fallback="silent",
        )
        step = TrainStep(
            randomised(module), loss, self.adamw(module), scale=LossScale(1024.0), **more
        )
        x = self.x.half() if self.on_gpu else self.x
        return module, lambda: step(x, self.target)

    def torchs(self, *, compiled: bool) -> Call:
        module = randomised(SEResNet9Fixup(3)).to(self.device)
        if self.on_gpu:
            module = module.to(memory_format=torch.channels_last)
        inner: Any = torch.compile(module, mode="reduce-overhead") if compiled else module
        wrapped = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        optimizer, scaler = self.adamw(wrapped), torch.amp.GradScaler(self.device.type)
        products = torch.float16 if self.on_gpu else torch.bfloat16

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(self.device.type, products):
                value = loss(wrapped(self.x), self.target)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    def time_ms(self, call: Call, calls: int) -> float:
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


def raced(study: Study, ways: dict[str, Call], rounds: int, calls: int) -> dict[str, Any]:
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
    ways: dict[str, Call] = {}
    if arguments.compile:  # first: it takes longest
        ways["DDP(compile reduce-overhead)"] = study.torchs(compiled=True)
        ways["DDP(compile reduce-overhead)"]()
    module, step = study.ours(process_group=group)
    for _ in range(arguments.steps):
        step()
    found: dict[str, Any] = {"steps": arguments.steps, "unequal_parameters": unequal(module)}
    ways |= {"one": study.ours()[1], "ranks": step}
    ways["ranks, float16 sent"] = study.ours(process_group=group, reduce_dtype=torch.float16)[1]
    ways["DDP"] = study.torchs(compiled=False)
    for call in ways.values():
        for _ in range(4):
            call()
    found["rows"] = rows = raced(study, ways, arguments.rounds, arguments.calls)
    rivals = [row["median_ms"] for name, row in rows.items() if name.startswith("DDP")]
    ours = rows["ranks"]["median_ms"]
    return {**found, "of_one": ours / rows["one"]["median_ms"], "of_best_ddp": ours / min(rivals)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=2048, help="of each rank")
    parser.add_argument("--steps", type=int, default=500, help="before weights are compared")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=30, help="in a round, of each way")
    parser.add_argument("--compile", action="store_true", help="also torch.compile's row")
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
