"""tools/studies/cifar: rows of one run, what it writes, and what it does when a row fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from torch import nn

from plantune.measure.timing import Timing
from plantune.models.resnet import resnet18

from ....fake_gpu import replace_torchs


def small(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)),
    )


@pytest.fixture
def study(part, monkeypatch: pytest.MonkeyPatch):
    """The tool's main, with a network that trains in no time."""
    table = part("workloads").SMALL
    others = {100: lambda: small(100)}
    workload = replace(table["resnet50"], build=small, batch=8, other_classes=others)
    monkeypatch.setitem(table, "resnet50", workload)
    monkeypatch.setattr(part("phases"), "FIRST_CALLS", 1)
    return part("cifar_main")


def test_rows_follow_the_baseline_and_their_phases_add_up(study, tmp_path: Path, capsys) -> None:
    names = ["baseline", "pinned", "torchscript", "plantune", "plantune-step"]
    options = f"--small --images 20 --epochs 2 --race-seconds 0.05 --out {tmp_path}"
    profiles = "--profile plantune --cprofile plantune-step --save"
    given = [*options.split(), *profiles.split(), str(tmp_path / "weights.pt")]
    assert study.main([*given, "--variants", *names]) == 0

    document = json.loads((tmp_path / "cifar_study.json").read_text())
    rows = {row["variant"]: row for row in document["rows"]}
    assert [*rows] == names
    baseline = rows["baseline"]
    for row in rows.values():
        assert len(row["losses"]) == 6  # two epochs of 8, 8 and 4 images
        assert row["losses"] == pytest.approx(baseline["losses"], rel=1e-3)
        assert abs(row["accuracy_beside_baseline"]) <= 0.01
        assert row["total_ms"] == pytest.approx(sum(row["ms"].values()))
        assert row["ragged_ms"]
    assert {*baseline["ms"]} == {"data", "forward", "backward", "optimizer", "other"}
    assert {*rows["plantune-step"]["ms"]} == {"data", "whole", "other"}
    assert {*document["race"]["rows"]} == {"plantune", "plantune-step"}
    assert document["environment"]["arch"] == "cpu"
    trace = json.loads((tmp_path / "plantune.trace.json").read_text())
    assert trace["traceEvents"]
    profile = json.loads((tmp_path / "plantune.profile.json").read_text())
    assert any("conv" in row["operator"] for row in profile["operators"])
    assert (tmp_path / "plantune-step.pstats").stat().st_size
    assert (tmp_path / "cifar_study.png").stat().st_size
    held = torch.load(tmp_path / "weights.pt", weights_only=True)
    small().load_state_dict(held)
    assert "cumulative" in capsys.readouterr().out


def test_images_of_a_folder_are_trained_on(study, tmp_path: Path) -> None:
    """Of CIFAR-100 too, where the small network has ten classes for made images."""
    for name, count in (("train.bin", 12), ("test.bin", 8)):
        pixels = torch.randint(256, (count, 3074), dtype=torch.uint8)
        pixels[:, 1] = torch.arange(count) * 8  # the fine label
        (tmp_path / name).write_bytes(bytes(pixels.flatten().tolist()))
    options = "--small --race-seconds 0 --variants baseline plantune-step --data"
    given = [*options.split(), str(tmp_path)]
    assert study.main([*given, "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "cifar_study.json").read_text())
    assert (document["data"], document["images"]) == ("CIFAR-100", 12)
    baseline, ours = (row["losses"] for row in document["rows"])
    assert len(baseline) == 2
    assert ours == pytest.approx(baseline, rel=1e-3)
    with pytest.raises(SystemExit, match="is not CIFAR with 10 or 100 classes"):
        study.main([*options.split(), str(tmp_path.parent)])


def test_a_row_that_fails_leaves_the_others(
    study, part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("no such compiler\nat all")

    variants = part("variants").VARIANTS
    monkeypatch.setitem(variants, "torchscript", replace(variants["torchscript"], make=broken))
    options = ["--small", "--images", "8", "--variants", "baseline", "torchscript", "--out"]
    assert study.main([*options, str(tmp_path)]) == 1
    document = json.loads((tmp_path / "cifar_study.json").read_text())
    assert document["failures"] == {"torchscript": "RuntimeError: no such compiler"}
    assert [row["variant"] for row in document["rows"]] == ["baseline"]
    assert "torchscript failed" in capsys.readouterr().out


def test_the_race_names_the_best_rival(part, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the median of steps; only rows of ours have a ratio."""
    race, variants = part("race"), part("variants").VARIANTS
    times = {"compile": 6.0, "plantune-step": 3.0, "baseline": 4.0}

    def timed(turns: list, effort: object, watch: object) -> list:
        for turn in turns:
            turn()
        return [Timing((1e3 * ms * race.STEPS,) * 9) for ms in times.values()]

    monkeypatch.setattr(race, "time_interleaved", timed)
    taken = dict.fromkeys(times, 0)

    def trained(name: str):
        def step(images: torch.Tensor, labels: torch.Tensor, mark: object) -> None:
            taken[name] += 1

        return part("training").Trained(variants[name], nn.Identity(), step)

    batch = torch.zeros(2, 3, 4, 4), torch.zeros(2)
    found = race.raced([trained(name) for name in times], batch, 1.0)
    assert found["best_rival"] == "baseline"
    assert found["ratios"] == {"plantune-step": {"ratio": 0.75, "low": 0.75, "high": 0.75}}
    assert {n: row["median_ms"] for n, row in found["rows"].items()} == pytest.approx(times)
    assert set(taken.values()) == {1 + race.STEPS}
    assert "0.750 (0.750 to 0.750)" in part("shown").shown_race(found)


def test_a_dry_run_writes_nothing(study, tmp_path: Path, capsys) -> None:
    options = "--small --dry-run --variants baseline plantune-step --out"
    assert study.main([*options.split(), str(tmp_path)]) == 0
    assert not [*tmp_path.iterdir()]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "{" in line]
    assert [row["losses"] for row in rows] == [2, 2]


@pytest.mark.parametrize("name", ["resnet50", "airbench94"])
def test_the_calls_before_a_capture_leave_nothing_behind(
    study, part, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """But for numbers that a step draws, of which there are none."""
    replace_torchs(monkeypatch)
    ways, workload = part("ways"), part("workloads").SMALL[name]
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    models, losses = [], []
    for make in (ways.eager, ways.captured):
        torch.manual_seed(0)
        model = workload.build()
        setting = ways.Setting(workload, model, torch.device("cpu"), ways.Precision(), True, 4)
        step = make(setting, images)
        losses.append(step(images, labels, lambda name: None))
        models.append(model)
    torch.testing.assert_close(losses[1], losses[0])
    states = (model.state_dict().values() for model in reversed(models))
    for own, other in zip(*states, strict=True):
        torch.testing.assert_close(own, other)


def test_a_search_comes_before_the_rows(
    study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """With the network and a whole batch that the rows have."""
    asked = []

    class Found:
        def summary(self) -> str:
            return "0.5 of eager"

    def tune(model: nn.Module, images: torch.Tensor, **how: object) -> Found:
        asked.append((type(model), images.shape, how))
        return Found()

    monkeypatch.setattr(study, "tune", tune)
    options = "--small --images 12 --search 30 --variants baseline --dry-run"
    assert study.main(options.split()) == 0
    assert asked == [(nn.Sequential, (8, 3, 32, 32), {"budget": 30.0, "mode": "train"})]
    assert capsys.readouterr().out.startswith("0.5 of eager")
    with pytest.raises(SystemExit):
        study.main(["--search", "30"])
    assert "--precision float32" in capsys.readouterr().err


def test_checkpoints_are_torchvisions(part, tmp_path: Path) -> None:
    """Of a network in channels_last, back and forth; tests of the models hold its names."""
    workloads, file = part("workloads"), tmp_path / "weights.pt"
    trained = resnet18(num_classes=10).to(memory_format=torch.channels_last)
    workloads.save_weights(trained, file)
    held = torch.load(file, weights_only=True)
    assert all(tensor.is_contiguous() for tensor in held.values())
    resnet18(num_classes=10).load_state_dict(held)
    other = resnet18(num_classes=7)
    assert workloads.load_weights(other, file) == ["fc.weight", "fc.bias"]
    assert torch.equal(other.layer4[0].conv1.weight, trained.layer4[0].conv1.weight)


def test_phases_are_what_the_clock_says(part, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = part("phases")
    times = iter([float(second) for second in (*range(12), 20, 21, 23, 26, 30, 31, 33, 36)])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(times))
    assert phases.FIRST_CALLS == 3
    watch = phases.Phases(torch.device("cpu"))
    for _ in range(5):
        watch.begin()
        watch.mark("data")
        watch.mark("whole")
        watch.end(8)
    assert watch.means(8) == {"data": 1000.0, "whole": 2000.0, "other": 3000.0}
    assert watch.means(7) == {}


def test_airbench_whitens_patches_and_begins_as_identity(part) -> None:
    airbench = part("airbench")
    torch.manual_seed(0)
    model = airbench.Airbench()
    images = torch.randn(50, 3, 32, 32)
    images[:, 1] = images[:, 0] + 0.5 * images[:, 1]
    model.whitened(images)
    made = nn.functional.conv2d(images, model.whiten.weight[:12])
    rows = made.permute(0, 2, 3, 1).reshape(-1, 12)
    torch.testing.assert_close(rows.T @ rows / len(rows), torch.eye(12), atol=0.01, rtol=0)
    assert torch.equal(model.whiten.weight[12:], -model.whiten.weight[:12])
    x = torch.randn(2, 64, 5, 5)
    torch.testing.assert_close(model.groups[0].conv2(x), x)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 1_971_352


def test_airbenchs_step_is_the_scripts(part) -> None:
    airbench = part("airbench")
    model = airbench.narrowed(airbench.Airbench(), torch.bfloat16)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert {d for n, d in kinds.items() if "norm" in n} == {torch.float32}
    assert {d for n, d in kinds.items() if "norm" not in n} == {torch.bfloat16}
    norms, others = airbench.optimizer(model, fused=False, capturable=False).param_groups
    assert len(norms["params"]) == 6  # biases alone
    assert len(others["params"]) == 8  # six convolutions, the first bias, the head
    assert norms["lr"] == pytest.approx(64 * others["lr"])
    # Decay is the same for both: torch multiplies it by the rate.
    assert norms["lr"] * norms["weight_decay"] == pytest.approx(
        others["lr"] * others["weight_decay"]
    )
    parts = [airbench.part_of_rate(step, 200) for step in range(201)]
    assert (parts[0], parts[46], parts[200]) == pytest.approx((0.2, 1.0, 0.07))
    assert max(parts) == parts[46]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["amp", "float32"])
def test_captured_steps_follow_single_ones(
    part, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the real network; half of a batch at last."""
    options = f"--images 320 --precision {precision} --race-seconds 0 --workers 0"
    given = [*options.split(), "--out", str(tmp_path), "--variants"]
    names = ["baseline", "cuda-graph", "plantune-step"]
    baseline, *others = losses_of(part, tmp_path, [*given, *names, "--epochs", "2"])
    table = part("workloads").WORKLOADS
    pool = table["resnet50"]
    second = [baseline[1]]
    for draw in range(4):
        monkeypatch.setitem(table, "resnet50", replace(pool, build=rounded(pool.build, draw)))
        second += [losses_of(part, tmp_path, [*given, "baseline", "--steps", "2"])[0][1]]
    # Adam's first step moves each weight as far, however small its gradient, so that roundings
    # alone move this loss by per cents: not by more than four, which would be another network's.
    # Later ones are further apart.
    apart = min(4 * stdev(second), 0.04 * mean(second))
    for losses in others:
        assert losses[0] == pytest.approx(baseline[0], rel=0.01)
        assert losses[1] == pytest.approx(mean(second), abs=apart), second
        assert losses[1] != pytest.approx(losses[0], rel=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_whole_steps_take_turns_with_a_graph_of_eagers(part, tmp_path: Path) -> None:
    options = (
        f"--images 256 --race-seconds 0.5 --out {tmp_path} --variants cuda-graph plantune-step"
    )
    assert part("cifar_main").main(options.split()) == 0
    race = json.loads((tmp_path / "cifar_study.json").read_text())["race"]
    assert race["best_rival"] == "cuda-graph"
    ratio, rows = race["ratios"]["plantune-step"], race["rows"]
    assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
    quotient = rows["plantune-step"]["median_ms"] / rows["cuda-graph"]["median_ms"]
    assert ratio["ratio"] == pytest.approx(quotient, rel=0.2)


def losses_of(part, place: Path, given: list[str]) -> list[list[float]]:
    assert part("cifar_main").main(given) == 0
    rows = json.loads((place / "cifar_study.json").read_text())["rows"]
    return [row["losses"] for row in rows]


def rounded(build: Callable[..., nn.Module], draw: int) -> Callable[..., nn.Module]:
    """The network with weights as far away as a rounding to float16 or TF32 takes them, in which
    products are computed.
    """

    def made() -> nn.Module:
        model = build()
        random = torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 2**-11 * (2 * torch.rand(weight.shape, generator=random) - 1))
        return model

    return made
