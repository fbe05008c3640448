"""What plantune ships serves every H100 and H200: proved in the first call, without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="plans are shipped for sm90 only",
    ),
]

# In a process of its own, so that the first use of cuDNN and cuBLAS counts.
CODE = """
import json, time, warnings
import torch, plantune
from plantune.runtime.calls import choose

mode = {mode!r}

seconds, recheck = [], choose.recheck

def timed(*arguments):
    torch.cuda.synchronize()
    start = time.perf_counter()
    recheck(*arguments)
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)

choose.recheck = timed
warnings.simplefilter("error")
model = plantune.load_model("se_resnet9_fixup", batch={batch}, mode=mode, fallback="error")
x = torch.randn({batch}, 3, 64, 64, device="cuda", dtype=torch.float16)
with torch.set_grad_enabled(mode == "train"):
    y = model(x)
finite = bool(y.isfinite().all())
if mode == "train":
    y.float().mean().backward()
    finite &= all(bool(p.grad.isfinite().all()) for p in model.parameters())
print(json.dumps([seconds, model.plan.origin, finite]))
"""


def first_call(cache: Path, batch: int, mode: str) -> tuple[list[float], str, bool]:
    environment = {**os.environ, "PLANTUNE_CACHE_DIR": str(cache)}
    code = CODE.format(batch=batch, mode=mode)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, origin, finite = json.loads(done.stdout)
    return seconds, origin, finite


@pytest.mark.parametrize(
    ("batch", "mode"), [(1, "infer"), (32, "infer"), (128, "infer"), (2048, "train")]
)
def test_the_first_call_proves_and_the_second_process_does_not(
    tmp_path: Path, batch: int, mode: str
) -> None:
    (first, origin, finite) = first_call(tmp_path, batch, mode)  # compiles the kernels
    assert (len(first), origin, finite) == (1, "measured", True)
    assert first_call(tmp_path, batch, mode)[0] == []
