from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plantune.graph.layouts import ALIGNMENT_BYTES, aligned
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models.se_resnet9 import se_resnet9_fixup
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.program import memory_plan as module
from plantune.runtime.program.memory_plan import Lifetime, liveness, plan_memory
from plantune.runtime.program.schedule import make_schedule


def peak_bytes(buffers):
    """The most bytes that are live at once: no plan can do with less."""
    moments = {b.first for b in buffers}
    return max(
        (sum(aligned(b.size_bytes) for b in buffers if b.first <= m <= b.last) for m in moments),
        default=0,
    )


def overlapping(buffers, plan):
    """Pairs that live at the same time in the same bytes, counted from their definition."""
    for a, b in itertools.combinations(buffers, 2):
        together = set(range(a.first, a.last + 1)) & set(range(b.first, b.last + 1))
        bytes_of = [
            set(range(plan.starts[x.name], plan.starts[x.name] + x.size_bytes)) for x in (a, b)
        ]
        if together and bytes_of[0] & bytes_of[1]:
            yield a, b


@st.composite
def lifetimes(draw):
    count = draw(st.integers(0, 12))
    buffers = []
    for index in range(count):
        first = draw(st.integers(0, 10))
        size = draw(st.sampled_from((0, 1, 63, 64, 65, 128, 500, 1000)))
        buffers.append(Lifetime(f"b{index}", size, first, first + draw(st.integers(0, 5))))
    return buffers


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lifetimes())
def test_what_lives_together_is_stored_apart(buffers):
    plan = plan_memory(buffers)
    assert list(overlapping(buffers, plan)) == []
    assert set(plan.starts) == {b.name for b in buffers}
    assert all(start % ALIGNMENT_BYTES == 0 for start in plan.starts.values())
    ends = [plan.starts[b.name] + aligned(b.size_bytes) for b in buffers]
    assert plan.size_bytes == max(ends, default=0)
    assert peak_bytes(buffers) <= plan.size_bytes <= sum(aligned(b.size_bytes) for b in buffers)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(lifetimes(), st.randoms(use_true_random=False))
def test_the_order_of_buffers_does_not_matter(buffers, rng):
    shuffled = list(buffers)
    rng.shuffle(shuffled)
    assert plan_memory(shuffled) == plan_memory(buffers)


def test_the_property_sees_a_plan_that_overlaps(monkeypatch):
    """Lifetimes that only touch meet too: the last reader runs beside the next writer."""
    monkeypatch.setattr(Lifetime, "overlaps", lambda a, b: a.first < b.last and b.first < a.last)
    buffers = [Lifetime("a", 64, 0, 1), Lifetime("b", 64, 1, 2)]
    assert list(overlapping(buffers, plan_memory(buffers)))


@pytest.mark.parametrize(
    ("lives", "wanted"),
    [
        ([(5, 3, 3), (5, 2, 4), (4, 1, 2)], (10, 14)),
        ([(4, 0, 2), (5, 2, 4), (3, 1, 1), (3, 0, 1)], (12, 10)),
    ],
)
def test_the_better_of_two_orders_is_taken(lives, wanted):
    buffers = [Lifetime(str(at), 256 * size, *life) for at, (size, *life) in enumerate(lives)]
    sizes = [module._placed(buffers, order).size_bytes // 256 for order in module.ORDERS]
    assert tuple(sizes) == wanted
    assert plan_memory(buffers).size_bytes == 256 * min(wanted) == peak_bytes(buffers)


def test_nothing_needs_nothing():
    assert plan_memory([]).size_bytes == 0


def test_a_chain_needs_two_buffers():
    buffers = [Lifetime(f"b{i}", 1024, i, i + 1) for i in range(20)]
    assert plan_memory(buffers).size_bytes == 2 * 1024


def test_a_gap_between_two_buffers_is_used():
    buffers = [
        Lifetime("long", 2 * ALIGNMENT_BYTES, 0, 9),
        Lifetime("large", 4 * ALIGNMENT_BYTES, 0, 3),
        Lifetime("small", 1 * ALIGNMENT_BYTES, 5, 6),
        Lifetime("other", 3 * ALIGNMENT_BYTES, 5, 9),
    ]
    assert plan_memory(buffers).size_bytes == 6 * ALIGNMENT_BYTES


def test_the_smallest_gap_is_enough_for_a_residual():
    """A residual lives beside a chain of convolutions: three buffers of one size."""
    chain = [Lifetime(f"c{i}", 640, i, i + 1) for i in range(6)]
    residuals = [Lifetime(f"r{i}", 640, i, i + 3) for i in range(0, 6, 3)]
    assert plan_memory(chain + residuals).size_bytes == peak_bytes(chain + residuals)


def test_real_networks_need_little_more_than_their_peak(case_of, space):
    ratios = []
    for seed, mode in itertools.product(range(10), ("infer", "eval", "train")):
        case = case_of(seed, mode)
        checked = check_plan(case.plan, case.graph, space)
        buffers = liveness(make_schedule(checked)).buffers
        ratios.append(plan_memory(buffers).size_bytes / peak_bytes(buffers))
    assert max(ratios) <= 1.5
    assert sum(ratios) / len(ratios) <= 1.05


def test_se_resnet9_reuses_memory(space):
    graph = extract(se_resnet9_fixup().eval(), TensorType((2, 3, 64, 64)))
    plan = framework_plan(graph, space, network="se_resnet9_fixup")
    buffers = liveness(make_schedule(check_plan(plan, graph, space))).buffers
    size = plan_memory(buffers).size_bytes
    assert size == peak_bytes(buffers)
    assert size < sum(b.size_bytes for b in buffers) / 5
