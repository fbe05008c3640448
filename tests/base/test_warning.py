"""Every warning of the package names the line of the user's code that it came from."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import plantune
from plantune import UnplannedCall, optimize
from plantune.base.warning import warn
from plantune.errors import PlantuneWarning

ROOT = Path(plantune.__file__).parent
X, OTHER = torch.randn(2, 3), torch.randn(5, 3)
KINDS = ("UserWarning", "Warning", "RuntimeWarning", "DeprecationWarning", "FutureWarning")


def others(text: str) -> list[str]:
    """Ways to warn, in a file's text, that are not `plantune.base.warning.warn`."""
    return [f"line {node.lineno}: {said}" for node, said in _ways(ast.parse(text))]


def _ways(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit"):
            if isinstance(node.value, ast.Name) and node.value.id in ("warnings", "logging"):
                yield node, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "warnings":
            yield from ((node, f"imports {a.name}") for a in node.names if "warn" in a.name)
        elif isinstance(node, ast.keyword) and node.arg == "stacklevel":
            yield node.value, "counts frames"
        elif isinstance(node, ast.ClassDef) and node.name != "PlantuneWarning":
            names = [base.id for base in node.bases if isinstance(base, ast.Name)]
            yield from ((node, f"{node.name} is a {n}") for n in names if n in KINDS)


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_file_warns_in_this_way_alone(path: Path) -> None:
    if path != ROOT / "base/warning.py":
        assert others(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import warnings\nwarnings.warn('x')",
        "from warnings import warn",
        "warn('x', stacklevel=2)",
        "class Slow(UserWarning): ...",
    ],
)
def test_another_way_is_found(text: str) -> None:
    assert len(others(text)) == 1


class Calls:
    """Ways in which a user's code comes to a call without a plan; each says where it does."""

    @staticmethod
    def directly(tuned: Any) -> None:
        tuned(OTHER)  # here

    @staticmethod
    def by_forward(tuned: Any) -> None:
        tuned.forward(OTHER)  # here

    @staticmethod
    def in_modules_of_torch(tuned: Any) -> None:
        nn.Sequential(nn.Sequential(tuned))(OTHER)  # here

    @staticmethod
    def with_hooks(tuned: Any) -> None:
        tuned.register_forward_hook(lambda *given: None)
        tuned(OTHER)  # here

    @staticmethod
    def without_gradients(tuned: Any) -> None:
        torch.no_grad()(tuned)(OTHER)  # here

    @staticmethod
    def checkpointed(tuned: Any) -> None:
        torch.utils.checkpoint.checkpoint(tuned, OTHER, use_reentrant=False)  # here

    @staticmethod
    def in_a_graph_of_fx(tuned: Any) -> None:
        torch.fx.GraphModule(nn.Sequential(tuned), _calling())(OTHER)  # here

    @staticmethod
    def compiled(tuned: Any) -> None:
        torch.compile(tuned, backend="eager")(OTHER)  # here

    @staticmethod
    def in_ddp(tuned: Any) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            nn.parallel.DistributedDataParallel(tuned)(OTHER)  # here
        finally:
            dist.destroy_process_group()

    @staticmethod
    def in_a_thread(tuned: Any) -> None:
        def run() -> None:
            tuned(OTHER)  # here

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    @staticmethod
    def in_a_data_loader(tuned: Any) -> None:
        class Made(Dataset[Tensor]):
            def __len__(self) -> int:
                return 1

            def __getitem__(self, index: int) -> Tensor:
                result: Tensor = tuned(OTHER)  # here
                return result

        list(DataLoader(Made()))


def _calling() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    graph.output(graph.call_module("0", (graph.placeholder("x"),)))
    return graph


WAYS = {name: way for name, way in inspect.getmembers(Calls) if not name.startswith("_")}


def line_of(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(function)
    return next(first + n for n, line in enumerate(lines) if line.endswith("# here\n"))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_call_without_a_plan_names_the_users_line(way: Callable[..., Any]) -> None:
    tuned = optimize(nn.Linear(3, 4).eval(), X)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", PlantuneWarning)
        way(tuned)
    (one,) = [each for each in said if issubclass(each.category, PlantuneWarning)]
    assert (one.category, one.filename) == (UnplannedCall, __file__)
    assert one.lineno == line_of(way)


def module_in(folder: Path, name: str, text: str) -> ModuleType:
    """A module whose file is there."""
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    made = ModuleType(name)
    exec(compile(text, str(path), "exec"), vars(made))
    return made


WRAPPER = """
class Trainer:
    def fit(self, module, x):
        return self._step(module, x)

    def _step(self, module, x):
        return module(x)
"""


def test_an_installed_trainer_is_passed_over(tmp_path: Path) -> None:
    trainer = module_in(tmp_path / "lib" / "site-packages", "trainers", WRAPPER).Trainer()
    tuned = optimize(nn.Linear(3, 4).eval(), X)
    with pytest.warns(UnplannedCall) as said:
        trainer.fit(tuned, OTHER)
    assert said[0].filename == __file__


def test_a_users_own_trainer_is_named(tmp_path: Path) -> None:
    made = module_in(tmp_path, "trainers", WRAPPER)
    tuned = optimize(nn.Linear(3, 4).eval(), X)
    with pytest.warns(UnplannedCall) as said:
        made.Trainer().fit(tuned, OTHER)
    assert said[0].filename == str(tmp_path / "trainers.py")


@pytest.mark.parametrize("where", ["site-packages", "dist-packages"])
def test_without_a_line_of_the_users_an_installed_one_is_named(where: str, tmp_path: Path) -> None:
    """As a program that is itself installed: nothing else is on its stack."""
    text = "def main(call):\n    call()\n"
    made = module_in(tmp_path / where, "agents", text)
    said: list[str] = []

    def listen(*given: Any) -> None:
        said.append(given[2])

    def call() -> None:
        warn("slow")

    # Where plantune's own code would be.
    call = type(call)(call.__code__, {"__name__": "plantune.runtime", "warn": warn})
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = listen
        thread = threading.Thread(target=made.main, args=(call,))
        thread.start()
        thread.join()
    assert said == [str(tmp_path / where / "agents.py")]


def test_a_line_is_told_once_and_another_one_again() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("slow")
        warn("slow")
    assert len(said) == 2


def test_in_a_string_of_code_it_names_its_line() -> None:
    code = "from plantune.base.warning import warn\n\nwarn('slow')\n"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert told.startswith("<string>:3: PlantuneWarning: slow")
