"""Networks of the user's own, by where their factory is, and what is said if that does not work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from plantune.errors import InvalidNetwork, UnknownNetwork
from plantune.models.factory import Factory
from plantune.plans.workload import Workload

CODE = """
from torch import nn
import beside

class Net(nn.Module):
    def __init__(self, width=1):
        super().__init__()
        self.conv = nn.Conv2d(3, 4 * width, beside.KERNEL)

    def forward(self, x):
        return self.conv(x)

made = Net(3)
number = 3

class Inner:
    @staticmethod
    def small(width=1):
        return Net(width)

def none():
    return None

def lazy():
    return nn.LazyLinear(3)

def meta():
    return nn.Linear(3, 3, device="meta")

def broken():
    return nowhere
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_nets.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("KERNEL = 3\n")
    (tmp_path / "faulty.py").write_text("x = 1\nraise SystemExit('no main guard')\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_nets", "beside", "faulty", "needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("own_nets", "beside", "faulty", "needs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["own_nets", "own_nets.py", "./own_nets.py"])
@pytest.mark.parametrize("name", ["Net", "Inner.small"])
def test_a_factory_is_found_and_called(place: str, name: str) -> None:
    module = Factory(f"{place}:{name}", (("width", 2),)).build()
    assert isinstance(module, nn.Module)
    assert module.conv.out_channels == 8


def test_a_module_is_taken_as_it_is() -> None:
    assert Factory("own_nets:made").build().conv.out_channels == 12


REFUSED: dict[str, tuple[str, type[Exception], str]] = {
    "no module": ("nowhere.at_all:f", UnknownNetwork, "no module 'nowhere'.*a path|no module"),
    "no file": ("nowhere.py:f", UnknownNetwork, "there is no file .*nowhere.py"),
    "no factory": ("own_nets:Ned", UnknownNetwork, "own_nets has no 'Ned'; did you mean Net"),
    "a failing module": ("faulty:f", InvalidNetwork, r"imported: SystemExit: no main guard \(.*:2"),
    "a missing package": ("needs.py:f", InvalidNetwork, r"no_such_package.*needs.py:1\)"),
    "a failing factory": ("own_nets:broken", InvalidNetwork, r"\(\) failed: NameError.*nets.py:31"),
    "a wrong argument": ("own_nets:Net", InvalidNetwork, "unexpected keyword argument 'depth'"),
    "no function": ("own_nets:number", InvalidNetwork, "own_nets:number is a int, not a function"),
    "a lazy layer": ("own_nets:lazy", InvalidNetwork, r"lazy\(\): weight of a lazy layer"),
    "no memory": ("own_nets:meta", InvalidNetwork, r"meta\(\): weight has no values"),
    "no network": ("own_nets:none", InvalidNetwork, r"none\(\) gives a NoneType, not an nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_told_with_its_line(case: str) -> None:
    spec, kind, said = REFUSED[case]
    given: tuple[tuple[str, Any], ...] = (("depth", 1),) if case == "a wrong argument" else ()
    with pytest.raises(kind, match=said):
        Factory(spec, given).build()


class TestWorkload:
    def test_a_factory_has_the_layers_of_its_module_and_a_tape(self) -> None:
        asked = Workload.on("cpu", None, network="own_nets:Net", inputs=("2x3x8x8",))
        assert (asked.batch, asked.problem.network, asked.problem.batch) == (2, "Net", 2)
        assert asked.graph.inputs[0][1].shape == (2, 3, 8, 8)
        assert asked.tape is not None
        assert asked.arguments() == "--model own_nets:Net --input 2x3x8x8"

    def test_settings_and_dtypes_count(self) -> None:
        asked = Workload.on(
            "cpu", "bfloat16", network="own_nets:Net", inputs=("2x3x8x8",), settings=(("width", 2),)
        )
        types = dict(asked.graph.parameters)
        assert (types["conv.weight"].shape[0], types["conv.weight"].dtype) == (8, "bfloat16")
        assert asked.to_json()["settings"] == {"width": 2}
        assert asked.arguments().endswith("--input 2x3x8x8 --set width=2")

    def test_a_reference_network_takes_images_of_another_size(self) -> None:
        asked = Workload.on("cpu", None, network="resnet18", batch=4, image_size=64)
        assert asked.problem.tensors[0][1].shape == (4, 3, 64, 64)
        again = Workload.of(asked.problem)
        assert (again, again.graph.digest) == (asked, asked.graph.digest)
        assert asked.arguments() == "--model resnet18 --batch 4 --image-size 64"

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"network": "own_nets:Net"}, "say what it is called with"),
            ({"settings": (("width", 2),)}, "--set is for a factory"),
            ({"settings": (("width", 2), ("width", 3))}, "--set width=... is given twice"),
            ({"inputs": ("2x3x8x8",), "batch": 2}, "leave --batch out"),
            ({"inputs": ("2x3x8x8",), "image_size": 8}, "--input or --image-size"),
        ],
    )
    def test_what_does_not_go_together_is_refused(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidNetwork, match=said):
            Workload.on("cpu", None, **given)
