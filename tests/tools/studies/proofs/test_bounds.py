"""No bound refuses the framework's own kernels, in either layout, on random blocks of all sizes."""

from __future__ import annotations

import pytest
import torch

from plantune.errors import CannotJudge, WrongResult

EACH, SEEDS = 10, 200
QUICK = 40  # beyond these it is a slow test


@pytest.fixture(autouse=True)
def quiet():
    """One thread, for small blocks; plans of training mode without gradients are asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*is in training mode")
@pytest.mark.parametrize(
    "first",
    [
        *range(0, QUICK, EACH),
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(QUICK, SEEDS, EACH)),
    ],
)
def test_the_frameworks_kernels_pass_every_bound(part, first):
    tool, refused, bounds = part("study"), [], set()
    for seed in range(first, first + EACH):
        case = part("cases").case_of(seed)
        for plan, tried in tool.tries(case):
            bounds.add(tried.bound)
            if not tried.passed:
                refused.append((seed, plan, case.text, tried.bound, tried.reason))
    assert refused == []
    assert bounds == {"step", "network", "race", "check"}


REFUSED_ONCE = {
    37: "a group norm in channels_last",
    41: "eager in channels_last, in a race",
    51: "a gradient that is zero but for rounding",
    1000: "a number in bfloat16 that is rounded twice",
    1014: "a batch norm in training in channels_last",
    1030: "a number in float16 that is rounded twice",
    1031: "a batch norm of two numbers",
    1080: "a NaN that torch's kernels lose",
    1085: "a gradient that torch does not write",
    1146: "a group norm of one pixel in channels_last",
    1219: "the gradient of a batch norm in channels_last",
    1258: "two numbers in bfloat16 that are rounded twice",
    1293: "a group norm of two numbers",
    1555: "a NaN that torch's kernels lose, between two layouts",
}


@pytest.mark.filterwarnings("ignore:.*is in training mode")
@pytest.mark.parametrize("seed", REFUSED_ONCE, ids=REFUSED_ONCE.get)
def test_what_a_bound_refused_once(part, seed):
    case = part("cases").case_of(seed)
    tried = [found for _, found in part("study").tries(case)]
    assert [each.reason for each in tried if not each.passed] == []


def test_a_seed_gives_the_same_case_again(part):
    one, other = (part("cases").case_of(5) for _ in range(2))
    assert one.text == other.text
    assert torch.equal(one.x, other.x)
    assert all(map(torch.equal, one.module.parameters(), other.module.parameters()))


def test_the_seeds_reach_every_kind_mode_dtype_and_one_pixel(part):
    cases = part("cases")
    texts = [cases.case_of(seed).text.split() for seed in range(SEEDS)]
    kinds, dtypes, modes = (set(words) for words in zip(*(text[:3] for text in texts), strict=True))
    assert kinds == set(part("blocks").KINDS)
    assert dtypes == set(cases.DTYPES["cpu"])
    assert modes == set(cases.MODES)
    assert any("1x1" in text[3] and "channels_last" in text for text in texts)


def test_on_a_gpu_the_seeds_reach_tf32_and_both_dtypes_of_16_bits(part, monkeypatch):
    cases = part("cases")
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *args, **kwargs: self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
    drawn = [cases.case_of(seed, cases.Asked("cuda")) for seed in range(60)]
    assert {case.tf32 for case in drawn if " float32 " in case.text} == {True, False}
    assert not any(case.tf32 for case in drawn if " float32 " not in case.text)
    assert {case.text.split()[1] for case in drawn} == {"float32", "float16", "bfloat16"}


class TestTool:
    """What it prints, and its exit code, with bounds that are made up."""

    @pytest.fixture
    def ran(self, part, monkeypatch, capsys):
        def run(*outcomes, bounds=("network",)):
            left = iter(outcomes)

            def bound(case, plan):
                outcome = next(left)
                yield part("bounds")._tried("network", outcome)

            monkeypatch.setitem(part("bounds").BOUNDS, "network", bound)
            given = ["--seeds", "0:1", "--bounds", "network", "--plans", "nchw", "nhwc"]
            return part("study").main(given), capsys.readouterr().out

        return run

    @staticmethod
    def passes():
        pass

    @staticmethod
    def refuses():
        raise WrongResult("output 0 is off by 3 of its size, allowed 2", 3.0, 2.0)

    @staticmethod
    def cannot_judge():
        raise CannotJudge("the framework itself overflows")

    def test_all_passed(self, ran):
        code, out = ran(self.passes, self.passes)
        assert code == 0
        assert out.splitlines()[-1].split() == ["network", "2", "0", "0", "0"]

    def test_a_refusal_is_told_with_its_figures(self, ran):
        code, out = ran(self.passes, self.refuses)
        assert code == 1
        assert "network: output 0 is off by 3 of its size, allowed 2" in out
        assert out.splitlines()[-1].split() == ["network", "1", "1", "0", "0"]

    def test_what_cannot_be_judged_is_no_refusal(self, ran):
        code, out = ran(self.passes, self.cannot_judge)
        assert code == 0
        assert out.splitlines()[-1].split() == ["network", "1", "0", "1", "0"]
