"""No file of code is longer than what a reader holds at once."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 400
KINDS = {".py", ".h", ".hpp", ".cpp", ".toml"}


@pytest.mark.parametrize("folder", ["plantune", "csrc", "search_spaces", "tests", "tools"])
def test_no_file_is_longer(folder):
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    lengths = {str(path): len(path.read_text().splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > MOST} == {}
