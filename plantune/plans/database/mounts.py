"""Whether a path is on a network file system, as /proc/mounts has it."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/mounts")
NETWORK = re.compile(
    r"(fuse\.)?(9p|afs|beegfs|ceph|cifs|davfs|glusterfs|gpfs|lustre|ncpfs|nfs4?|rclone|s3fs|smb3|"
    r"smbfs|sshfs)"
)


def network_file_system(path: Path) -> str | None:
    """The type of the network file system under `path`, None of a local or unknown one."""
    real = os.path.realpath(path)
    below = [
        (len(point), type_)
        for point, type_ in _mounts()
        if real == point or real.startswith(point.rstrip("/") + "/")
    ]
    # The deepest mount point decides, the last one if several are mounted on it.
    deepest = max((length for length, _ in below), default=0)
    types = [type_ for length, type_ in below if length == deepest]
    return types[-1] if types and NETWORK.fullmatch(types[-1]) else None


def _mounts() -> list[tuple[str, str]]:
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [(_unescaped(words[1]), words[2]) for words in fields if len(words) > 2]


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
