"""Several ways from the same seeds: what their mean difference is worth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from .test_study import small


def runs(accuracies: list[float], losses: list[float]) -> list[dict[str, float]]:
    pairs = zip(accuracies, losses, strict=True)
    return [{"accuracy": a, "last_loss": last, "first_loss": 2.0} for a, last in pairs]


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [
        ([0.701, 0.799, 0.752, 0.848], True),
        ([0.695, 0.795, 0.745, 0.845], True),  # always the same half point below
        ([0.73, 0.77, 0.78, 0.82], False),  # equal in the mean, which chance may have done
        ([0.68, 0.78, 0.73, 0.83], False),
    ],
)
def test_an_accuracy_is_kept_if_chance_cannot_hide_a_point(part, accuracies, kept) -> None:
    pairs = part("pairs")
    theirs = runs([0.7, 0.8, 0.75, 0.85], [1.0, 0.5, 0.7, 0.4])
    own = runs(accuracies, [1.001, 0.499, 0.702, 0.398])
    found = pairs.compared({"cuda-graph": theirs, "plantune-step": own}, 3)
    assert found["seeds"] == [3, 4, 5, 6]
    apart = found["differences"]["plantune-step"]
    assert apart["accuracy"]["kept"] is kept
    mean = sum(accuracies) / 4 - 0.775
    assert apart["accuracy"]["mean"] == pytest.approx(mean)
    # Of four differences of 0.001, -0.001, 0.002 and -0.002.
    assert apart["last_loss"]["standard_error"] == pytest.approx((1e-5 / 3 / 4) ** 0.5)
    assert apart["last_loss"]["kept"]
    assert ("kept" if kept else "not shown") in pairs.shown_pairs(found)


def test_one_pair_shows_nothing(part) -> None:
    pairs = part("pairs")
    found = pairs.compared({"a": runs([0.7], [1.0]), "b": runs([0.7], [1.0])}, 0)
    accuracy = found["differences"]["b"]["accuracy"]
    assert accuracy == {"mean": 0.0, "standard_error": None, "kept": False}
    assert "shows nothing" in pairs.shown_pairs(found)


def test_pairs_have_seeds_of_their_own_and_the_same_start(
    part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    table = part("workloads").SMALL
    workload = replace(table["resnet50"], build=small, batch=8)
    monkeypatch.setitem(table, "resnet50", workload)
    options = f"--small --images 16 --pairs 2 --seed 4 --contrast 0 90 --out {tmp_path}"
    assert part("cifar_main").main(options.split()) == 0
    document = json.loads((tmp_path / "cifar_study.json").read_text())
    found = document["pairs"]
    assert document["contrast"] == [0.0, 90.0]
    assert (found["reference"], found["seeds"]) == ("baseline", [4, 5])
    theirs, own = found["runs"]["baseline"], found["runs"]["plantune-step"]
    for one, other in zip(own, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    assert theirs[0]["first_loss"] != theirs[1]["first_loss"]
    assert "points apart" in capsys.readouterr().out
