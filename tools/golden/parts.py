"""What the golden files hold, each part as JSON by plain keys."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import subjects
from entry import (
    ARCH_NAMES,
    Graph,
    Plan,
    PlantuneError,
    SearchSpace,
    Workload,
    all_families,
    all_fusions,
    alternatives,
    candidates,
    check_plan,
    data_folder,
    family_named,
    find_stored_plan,
    framework_plan,
    guessed_plan,
    hand_plan,
    load_search_space,
    named_as,
    read_export,
    samples,
)

Json = Any
ARCHS = ("cpu", *subjects.ON_GPUS)
# Plans of batch 32 alone: others follow from the same rules.
PLANNED_BATCH, PLANNED_DTYPE = 32, {"cpu": "float32"}


def graphs() -> Iterator[tuple[str, Json]]:
    """Digests, and the signatures of all steps that there may be; of small modules each one."""
    for key, workload in (*subjects.networks(ARCHS), *subjects.small(ARCHS)):
        try:
            graph = subjects.graph_of(workload)
        except PlantuneError as error:  # that it is refused must stay so, too
            yield key, {"refused": type(error).__name__}
            continue
        found = {
            "digest": graph.digest,
            "named_digest": graph.named_digest,
            "order": _hash("\n".join(graph.structure.nodes)),
            "ops": dict(Counter(node.op for node in graph.nodes)),
        }
        steps = alternatives(graph, tuple(all_fusions()))
        if ".py" in workload.network:
            found["steps"] = {f"{s.name} +{len(s.nodes)}": s.signature[:16] for s in steps}
        else:
            found["signatures"] = _hash(" ".join(sorted({step.signature for step in steps})))
        yield key, found


def plans() -> Iterator[tuple[str, Json]]:
    """What runs where nothing was measured, for every arch."""
    for arch in ARCH_NAMES:
        space = load_search_space(arch)
        for key, graph, network in _planned(arch):
            for name, make in _MAKERS.items():
                plan = make(graph, space, network)
                if plan is not None:
                    yield f"{key} on {arch}: {name}", _plan_json(plan)


def _default(graph: Graph, space: SearchSpace, network: str) -> Plan | None:
    return framework_plan(graph, space, network=network)


@cache
def _guessed(graph: Graph, space: SearchSpace, network: str) -> Plan | None:
    """On a CPU, where calls run eager until a search, the plan by hand."""
    if space.arch.kind != "cuda":
        return hand_plan(graph, space, network=network)
    return guessed_plan(graph, space, network=network)


_MAKERS: dict[str, Callable[[Graph, SearchSpace, str], Plan | None]] = {
    "default": _default,
    "guess": _guessed,
}


def _planned(arch: str) -> Iterator[tuple[str, Graph, str]]:
    """Networks at one batch, and all small modules, in the arch's usual dtype."""
    alike = (subjects.alike(arch),)
    dtype = PLANNED_DTYPE.get(arch, "float16")
    for key, workload in (*subjects.networks(alike), *subjects.small(alike)):
        is_small = ".py" in workload.network
        if workload.dtype == dtype and (is_small or workload.batch == PLANNED_BATCH):
            yield key, subjects.graph_of(workload), workload.problem.network


def _plan_json(plan: Plan) -> Json:
    choices = [_choice_text(choice) for choice in plan.choices]
    told = {"runner": plan.route, "branches": plan.branches}
    return {"origin": plan.written_origin, **told, "digest": plan.digest, "choices": choices}


def _choice_text(choice: Any) -> str:
    config = " ".join(f"{name}={value}" for name, value in sorted(choice.candidate.config.items()))
    more = f" +{len(choice.nodes) - 1}" if choice.nodes[1:] else ""
    return f"{choice.nodes[0]}{more}: {choice.candidate.family} {config}".rstrip()


def sources() -> Iterator[tuple[str, Json]]:
    """Digests of what is compiled: a sample of each family, and the kernels of guesses."""
    for arch in ARCH_NAMES:
        space = load_search_space(arch)
        for step, candidate in samples(space) if space.arch.kind == "cuda" else _cpu_samples(space):
            source = _source(step, candidate, space)
            yield f"{arch}: {candidate.family}", {"config": dict(candidate.config), "is": source}
        for key, graph, network in _planned(arch):
            plan = _guessed(graph, space, network)
            if plan is not None:
                yield f"{arch}: kernels of {key}", _sources_of(plan, graph, space)
    for path in sorted(data_folder("csrc").rglob("*.*")):
        yield f"csrc: {path.name}", _hash(path.read_text("utf-8"))


def _cpu_samples(space: SearchSpace) -> Iterator[tuple[Any, Any]]:
    """Of each family that compiles something, the smallest step of a network."""
    workloads = (workload for _, workload in subjects.networks(("cpu",)))
    graph = subjects.graph_of(next(w for w in workloads if w.network == "se_resnet9_fixup"))
    steps = sorted(alternatives(graph, tuple(all_fusions())), key=lambda step: step.flops)
    for name, family in all_families().items():
        fits = (step for step in steps if name in space.families and not family.why_not_step(step))
        step = next(fits, None)
        if step is not None:
            legal = [c for c in candidates(step, space) if c.family == name]
            yield from ((step, c) for c in legal[:1])


def _sources_of(plan: Plan, graph: Graph, space: SearchSpace) -> Json:
    """By family, one digest of all its sources."""
    found: dict[str, list[str]] = {}
    steps = check_plan(plan, graph, space).steps
    for chosen in {each.step.signature: each for each in steps}.values():
        if (source := _source(chosen.step, chosen.candidate, space)) is not None:
            found.setdefault(chosen.family.name, []).append(source)
    return {family: _hash(" ".join(sorted(each))) for family, each in sorted(found.items())}


def _source(step: Any, candidate: Any, space: SearchSpace) -> str | None:
    family = family_named(candidate.family)
    source = family.source(family.parts(step), candidate.config, space.arch)
    return None if source is None else _hash(source)


def shipped() -> Iterator[tuple[str, Json]]:
    """Each shipped plan: that its network's layers find it, and its kernels fit them."""
    for path in sorted(data_folder("plans").glob("*.db")):
        space = load_search_space(path.stem)
        for number, item in enumerate(read_export(path)):
            plan, workload = item.plan, Workload.of(item.plan.problem)
            graph = subjects.graph_of(workload)
            found = find_stored_plan(workload.problem, item.environment, database=path)
            assert found is not None, f"{path.name}, {workload}: no plan is found"
            check_plan(named_as(plan, graph), graph, space)
            yield (
                f"{path.name} {number}: {workload}",
                {
                    "plan": plan.digest,
                    "found": found.plan.digest,
                    "match": found.match,
                    "environment": item.environment.key,
                    "text": _hash(plan.dumps()),
                    "steps": len(plan.choices),
                },
            )


def spaces() -> Iterator[tuple[str, Json]]:
    """The search space of each arch, and the fusions."""
    for arch in ARCH_NAMES:
        space = load_search_space(arch)
        counts = {name: len(space.configs(name)) for name in sorted(space.families)}
        yield arch, {"digest": space.digest, "configs": counts}
    yield "fusions", [fusion.name for fusion in all_fusions()]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


PARTS: dict[str, Callable[[], Iterator[tuple[str, Json]]]] = {
    "spaces": spaces,
    "graphs": graphs,
    "plans": plans,
    "sources": sources,
    "shipped": shipped,
}
