"""The tests on every Python, build and release of torch that plantune is for: `pipx run nox`.

    nox                                                     # all of it
    nox -s "tests-3.13(torch='newest', build='cuda')"       # one
    nox -s tests-3.11 -- tests/devices/cuda                         # some tests, on one Python

torch's builds for CPUs are taken from where pip is told to look for them (PIP_FIND_LINKS or
PIP_EXTRA_INDEX_URL); a build that is not offered is skipped, and said.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

PINNED = re.search(r"^torch==(.+)$", Path("constraints.txt").read_text(), re.MULTILINE)[1]
BUILD = "import torch; print('cuda' if torch.version.cuda else 'cpu')"
# Of the pinned release there may be both builds. Of the newest, pip takes the one it prefers.
REQUIREMENTS = {
    ("pinned", "cpu"): (f"torch=={PINNED}+cpu", "--constraint", "constraints.txt"),
    ("pinned", "cuda"): (f"torch==={PINNED}", "--constraint", "constraints.txt"),
    ("newest", "cpu"): ("torch",),
    ("newest", "cuda"): ("torch",),
}


@nox.session(python=["3.11", "3.13"], venv_backend="venv")
@nox.parametrize("build", ["cpu", "cuda"])
@nox.parametrize("torch", ["pinned", "newest"])
def tests(session: nox.Session, torch: str, build: str) -> None:
    """The whole suite; arguments go to pytest."""
    wanted = REQUIREMENTS[torch, build]
    session.install("--upgrade", *wanted, "-e", ".[dev]", success_codes=[0, 1])
    found = session.run("python", "-c", BUILD, silent=True, success_codes=[0, 1])
    if found.split()[-1:] != [build]:
        session.skip(f"pip offers no {torch} torch for {build}")
    arguments = session.posargs or ["--numprocesses", "auto"]
    session.run("pytest", *arguments, env={"OMP_NUM_THREADS": "1"})
