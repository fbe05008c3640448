"""The rows of a census: one line of JSON for each network, mode and measure, kept as they come."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[str, str, str]


def key_of(row: Row) -> Key:
    return row["network"], row["mode"], row["measure"]


class Rows:
    """A file of rows. The last row of a network counts; a line that a kill cut off does not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[Key, Row] = {}
        self._cut_off = ""
        self._lock = threading.Lock()
        if path.exists():
            text = path.read_text(encoding="utf-8")
            self._cut_off = "" if text.endswith("\n") or not text else "\n"
            for line in text.splitlines():
                row = _parsed(line)
                if row is not None:
                    self.by_key[key_of(row)] = row

    def add(self, row: Row) -> None:
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            self.by_key[key_of(row)] = row
            file.write(self._cut_off + json.dumps(row) + "\n")
            self._cut_off = ""

    def forget(self, verdicts: Collection[str]) -> None:
        """Leaves out rows with these verdicts, so that they are measured again."""
        if verdicts:
            kept = {k: row for k, row in self.by_key.items() if row["verdict"] not in verdicts}
            self.by_key, self._cut_off = kept, ""
            text = "".join(json.dumps(row) + "\n" for row in kept.values())
            self.path.write_text(text, encoding="utf-8")


def _parsed(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and {"network", "mode", "measure"} <= set(row) else None
