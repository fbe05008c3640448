"""Each way to translate says eager's words, on made sentences and on a file of pairs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

TOOL = str(Path(__file__).parents[3] / "tools" / "studies" / "translate.py")


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(TOOL)


def test_a_small_study_compares_ways_by_their_words(
    tool: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = tool["Sizes"](source_words=60, target_words=45, embedding=8, hidden=16)
    monkeypatch.setitem(tool["study"].__globals__, "SMALL", tiny)
    measured, rounded = tool["measured"], set()

    def noting(*given: Any) -> Any:
        rounded.add((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return measured(*given)

    monkeypatch.setitem(tool["study"].__globals__, "measured", noting)
    before = torch.backends.cudnn.allow_tf32
    options = "--small --sentences 4 --batch 1 2 --ways eager plantune --out"
    rows = tool["study"](tool["arguments"]([*options.split(), str(tmp_path)]))

    assert rounded == {(False, False)}
    assert torch.backends.cudnn.allow_tf32 == before
    assert [(row.way, row.batch, row.wrong) for row in rows] == [
        (way, batch, 0) for batch in (1, 2) for way in ("eager", "plantune")
    ]
    written = json.loads((tmp_path / "translate_study.json").read_text())
    assert [row["way"] for row in written["rows"]] == [row.way for row in rows]
    assert any(event["operator"] == "aten::gru" for event in written["survey"]["eager"])
    assert written["survey"]["plantune"]
    assert written["environment"]["arch"] == "cpu"
    assert "sentences/s" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_on_a_gpu_a_thousand_sentences_are_eagers(tool: dict[str, Any], tmp_path: Path) -> None:
    """Of the whole network, with the times of calls from CUDA graphs."""
    options = "--sentences 1024 --batch 64 --ways cuda-graph plantune --out"
    rows = tool["study"](tool["arguments"]([*options.split(), str(tmp_path)]))
    assert [(row.way, row.wrong) for row in rows] == [("cuda-graph", 0), ("plantune", 0)]
    replays = json.loads((tmp_path / "translate_study.json").read_text())["replays"]
    assert [(row["batch"], row["source_words"]) for row in replays] == [
        (batch, words) for batch in (1, 8, 64) for words in (1, 14)
    ]


def test_a_way_that_says_other_words_is_counted(tool: dict[str, Any]) -> None:
    calls = tool["batches"]([[1, 2, 3], [4]] * 3, 2, torch.device("cpu"))
    model = tool["translator"](tool["SMALL"], torch.device("cpu"))
    wanted = [tool["greedy"](model, *call) for call in calls]

    def silent(source: torch.Tensor, lengths: torch.Tensor) -> Any:
        return torch.ones(len(lengths), 25, dtype=torch.int64), lengths

    found = tool["measured"]("silent", silent, calls, wanted, model)
    assert (found.wrong, found.near) == (6, 0)
    assert [sentence for sentence, *_ in found.differences] == list(range(6))
    assert all(margin > 1e-3 for *_, margin in found.differences)


def test_words_that_float32_cannot_tell_apart_are_near(tool: dict[str, Any]) -> None:
    calls = tool["batches"]([[1, 2, 3], [4, 5]], 2, torch.device("cpu"))
    model = tool["translator"](tool["SMALL"], torch.device("cpu"))
    first = int(tool["greedy"](model, *calls[0])[0][0, 0])
    twin = 7 if first != 7 else 8
    output = model.decoder.output
    output.weight.data[twin], output.bias.data[twin] = output.weight[first], output.bias[first]
    wanted = [tool["greedy"](model, *call) for call in calls]

    def other(source: torch.Tensor, lengths: torch.Tensor) -> Any:
        words, steps = tool["greedy"](model, source, lengths)
        swapped = torch.where(words == first, twin, torch.where(words == twin, first, words))
        return swapped, steps

    found = tool["measured"]("other", other, calls, wanted, model)
    assert found.wrong == found.near == len(found.differences) >= 1
    assert all(abs(margin) < 1e-12 for *_, margin in found.differences)


def test_words_of_a_file_are_numbered_by_how_often_they_are_there(
    tool: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text("go on\tva\nGo .\tva .\n\tnothing\n", encoding="utf-8")
    assert tool["read_sentences"](file, 9, tool["SMALL"]) == [[1, 2], [1, 3]]
    few = tool["Sizes"](source_words=2)
    assert tool["read_sentences"](file, 1, few) == [[1, tool["UNKNOWN"]]]
