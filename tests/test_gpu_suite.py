"""tools/gpu_suite names every way there is: else a rival would be missing from what it records."""

from __future__ import annotations

import re
from pathlib import Path

from plantune.measure.ways import baselines_for

SUITE = Path(__file__).resolve().parents[1] / "tools" / "gpu_suite"


def test_all_ways_are_raced() -> None:
    text = SUITE.read_text(encoding="utf-8")
    quick = ",".join(re.findall(r"^quick=(?:\$quick,)?(.*)$", text, re.MULTILINE)).split(",")
    slow = re.findall(r"^slow=\((.*)\)$", text, re.MULTILINE)[0].split()
    assert sorted(quick + slow) == sorted(baselines_for("sm90"))
