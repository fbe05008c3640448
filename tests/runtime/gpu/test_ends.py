"""The collector, and the end of the process."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import plantune
from plantune import optimize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


class TestCollection:
    def test_a_live_graph_survives_the_collector(self, small, images, off):
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
    """The interpreter ends quietly, whatever is alive."""

    @pytest.mark.parametrize("alive", ALIVE)
    def test_with_live_graphs(self, alive, python):
        done = python(PRELUDE + ALIVE[alive])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
