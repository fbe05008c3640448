"""What every test has: one seed, so that a failure repeats, and a cache that is not the user's."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings

from plantune.devices.host import cxx_compiler
from plantune.plans.plan import PROGRAM
from plantune.runtime.calls import choose

from . import copies

ROOT = Path(__file__).resolve().parent.parent
# What has not come by then never will, however busy the machine: it only ends a test that hangs.
NEVER_S = 300.0
LONGEST = Path(__file__).with_name("house")
T = TypeVar("T")
# Else inductor starts as many processes as cores, each of which imports torch, for a test or two.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# On a busy machine an example takes longer than Hypothesis allows, and drawing one, too.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out what tests/costly.txt lists: compilers, processes, long tables"
    parser.addoption("--quick", action="store_true", help=text)


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("quick"):
        return None
    seconds = sum(costly.seconds for costly in costly_tests().values())
    return (
        f"quick: without {seconds:.0f} CPU seconds: compilers for every arch, processes of their "
        "own, long tables; tests/costly.txt names them"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest tests are in files of that folder: as the last ones they would leave one of the
    # processes waiting for another.
    items.sort(key=lambda item: item.path.parent != LONGEST)
    if not config.getoption("quick"):
        return
    seen: Counter[str] = Counter()
    wanted: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        name = item.nodeid.partition("[")[0]
        costly = costly_tests().get(name) or costly_tests().get(name.partition("::")[0])
        wanted[costly is None or costly.runs(seen[name])].append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=wanted[False])
    items[:] = wanted[True]


@dataclass(frozen=True)
class Costly:
    """A test, or a file, that a quick run leaves out, but for one of so many cases."""

    seconds: float
    one_of: int | None = None

    def runs(self, case: int) -> bool:
        return self.one_of is not None and case % self.one_of == 0


@cache
def costly_tests() -> dict[str, Costly]:
    """Those of tests/costly.txt by their names."""
    found = {}
    for line in (Path(__file__).parent / "costly.txt").read_text().splitlines():
        if not line.startswith("#"):
            seconds, *share, name = line.split()
            found[name] = Costly(float(seconds), *(int(part[2:]) for part in share))
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays: the garbage collector took a fifth of the time and found nothing
    (13.5 instead of 17.3 CPU seconds for 21,700 tests in each process, 2 cores, 2026-11-24).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Ten thousand tests and torch stay until the end: no collection looks through them again. Nor
    is each short-lived graph worth one, which took a fourteenth of the time; tests that are about
    memory ask for theirs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    # Without a GPU `torch.manual_seed` would keep the stack of each call for when there is one.
    seed = torch if torch.cuda.is_available() else torch.default_generator
    with torch.random.fork_rng(devices=[]):
        seed.manual_seed(0)
        yield


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Background processes of a shell are deaf to SIGINT, those of nohup to SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def binaries(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels, which all processes of this run share with those of the next.

    The name of each is the digest of all that it was compiled from, the compiler and the headers
    included: where any of that changed, it is compiled. `pytest --cache-clear` forgets them, with
    `-p no:cacheprovider` none outlives the run.
    """
    own = tmp_path_factory.getbasetemp()
    run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("binaries") if cache else run / "binaries"
    for part in ("cuda", "cpu"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory, binaries: Path) -> Iterator[None]:
    """Plans of this run only: what a user searched for decides no test."""
    folder = tmp_path_factory.mktemp("cache")
    for part in binaries.iterdir():
        (folder / part.name).symlink_to(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PLANTUNE_CACHE_DIR", str(folder))
        yield


def _eventually(holds: Callable[[], T], otherwise: str) -> T:
    end = time.monotonic() + NEVER_S
    while not (found := holds()):
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)
    return found


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], T], str], T]:
    """Waits for what will be the case, and returns it; a test that waits says what else is so."""
    return _eventually


@pytest.fixture(scope="module")
def copied_processes() -> Iterator[None]:
    """Python processes of a module's tests are copies, which start at once; see copies.py."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(subprocess, "Popen", copies.Copy)
        yield


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this test are not."""
    monkeypatch.setattr(subprocess, "Popen", copies.Popen)


@pytest.fixture(scope="session")
def migrations_read_once() -> Iterator[None]:
    """Optuna has Alembic load ten migrations, each of which defines all tables, whenever it opens a
    storage: a third of what a test of shared searches took.
    """
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    read = ScriptDirectory.from_config
    found: dict[str | None, ScriptDirectory] = {}

    def once(config: Config) -> ScriptDirectory:
        location = config.get_main_option("script_location")
        if location not in found:
            found[location] = read(config)
        return found[location]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", staticmethod(once))
        yield


@pytest.fixture(scope="session")
def is_gone() -> Callable[[int], bool]:
    """Whether a process ended; one that nobody has reaped yet ended too."""

    def ended(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
            return True

    return ended


@pytest.fixture(scope="session")
def is_free() -> Callable[[threading.RLock], bool]:
    """Whether another thread gets a lock, whoever holds it."""

    def ask(lock: threading.RLock) -> bool:
        def attempt() -> None:
            found.append(lock.acquire(blocking=False))
            if found[0]:
                lock.release()

        found: list[bool] = []
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return found[0]

    return ask


@pytest.fixture(autouse=True)
def programs_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the framework's kernels run as programs on a CPU, too, where eager would be faster:
    most tests are about programs.
    """
    monkeypatch.setitem(choose.UNPLANNED, "cpu", PROGRAM)


@pytest.fixture(autouse=True)
def nothing_shipped_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which plans plantune ships for CPUs decides no test but those of them."""
    monkeypatch.setattr(choose, "shipped_contender", lambda problem, here: None)


@pytest.fixture
def as_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that compile offer themselves; for tests that build nothing."""
    monkeypatch.setattr("plantune.kernels.families.inductor.cxx_compiler", lambda: "/bin/g++")
    monkeypatch.setattr("plantune.kernels.cpu.cxx.why_not_loadable", lambda *unit: None)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes families, by their names, the only ones that there are, with nothing built yet."""

    def only(**families: object) -> None:
        monkeypatch.setattr("plantune.kernels.registry.all_families", lambda: families)
        monkeypatch.setattr("plantune.kernels.build._built", {})

    return only


class NoBuilder:
    """Builds nothing, in no process."""

    def __init__(self, worker: object) -> None: ...

    def start(self) -> None: ...

    def build(self, *candidate: object) -> None: ...

    def pause(self, paused: bool) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """For searches whose worker is a fake: a process that builds takes 2 s to start."""
    monkeypatch.setattr("plantune.search.builds.Builder", NoBuilder)


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def build_command(folder: Path) -> list[str]:
    """Offline where the build's tools are there, else pip fetches them."""
    tools = (importlib.util.find_spec(name) for name in ("build", "hatchling"))
    if all(tools):
        options = ["--wheel", "--no-isolation", "--outdir"]
        return [sys.executable, "-m", "build", *options, str(folder), str(ROOT)]
    return [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(ROOT)]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, with compiled kernels if they can be compiled here."""
    folder = tmp_path_factory.mktemp("wheel")
    without = {} if cxx_compiler() else {"PLANTUNE_WITHOUT_KERNELS": "1"}
    done = run(build_command(folder), env={**os.environ, **without})
    unreachable = "Could not find a version that satisfies the requirement hatchling"
    if done.returncode and (unreachable in done.stderr or "No module named pip" in done.stderr):
        pytest.skip("no hatchling here, and no package index to fetch it from")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
