"""The code in docs/guide.md runs, from the first block to the last."""

from __future__ import annotations

import re
import warnings

import torch

from ..conftest import ROOT

TEXT = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def test_its_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is stored for the network, which is said
        for block in blocks:
            exec(compile(block.replace("budget=60", "budget=1"), "guide.md", "exec"), names)
    policy, frames = names["policy"], names["frames"]
    torch.testing.assert_close(names["actor"](frames[:1]), policy(frames[:1]))
    for name in ("server", "served", "compiled"):
        torch.testing.assert_close(names[name](frames), policy(frames))


def test_each_name_of_plantune_is_public() -> None:
    import plantune

    assert set(re.findall(r"\bplantune\.([A-Za-z]\w*)\(", TEXT)) <= set(plantune.__all__)
