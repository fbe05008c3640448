"""The whole plans that a search compares, each with what it is to the search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from plantune.plans.plan import Choice, Plan

# What runs calls now: what was not compared with it does not take its place. If it is stored here,
# only a plan that is clearly faster does.
IN_USE, STORED = "in use", "stored"
# What earlier searches found, for these layers or for others like them; the nearest of it.
KNOWN, NEAREST = "known", "nearest"
# What became of known plans in the warm start; those that failed in it have none of these.
TIMED, FASTEST, UNTIMED = "timed", "fastest", "untimed"
# Where the others come from.
COVER, FRAMEWORK, GUESS, HAND = "cover", "framework", "guess", "hand"


@dataclass(frozen=True)
class Contender:
    """A plan with its labels."""

    plan: Plan
    labels: frozenset[str]


@dataclass(frozen=True)
class Contenders:
    """Different plans with their labels, in the order in which they are compared: on a busy machine
    the first ones are all that is.
    """

    items: tuple[Contender, ...] = ()

    @staticmethod
    def of(contenders: Iterable[Contender]) -> Contenders:
        """In this order; those that choose the same are one, with the labels of all."""
        found: dict[frozenset[Choice], Contender] = {}
        for each in contenders:
            known = found.setdefault(frozenset(each.plan.choices), each)
            merged = replace(known, labels=known.labels | each.labels)
            found[frozenset(each.plan.choices)] = merged
        return Contenders(tuple(found.values()))

    def having(self, label: str) -> list[Contender]:
        return [each for each in self.items if label in each.labels]

    def plans(self, label: str | None = None) -> list[Plan]:
        """Those with a label, or all."""
        return [each.plan for each in (self.items if label is None else self.having(label))]

    def first(self, label: str) -> Plan | None:
        return next((each.plan for each in self.having(label)), None)

    def marked(self, label: str, plans: Iterable[Plan | None]) -> Contenders:
        """With this label, too, at those that choose as one of these plans."""
        chosen = {frozenset(plan.choices) for plan in plans if plan is not None}
        return Contenders(
            tuple(
                replace(each, labels=each.labels | {label})
                if frozenset(each.plan.choices) in chosen
                else each
                for each in self.items
            )
        )

    @property
    def before(self) -> list[Plan]:
        """What was there before the search, which only a clearly faster plan replaces. What a
        longer search found elsewhere is worth more than luck in a few rounds.
        """
        nearest = self.first(NEAREST) or self.first(IN_USE)
        return distinct(filter(None, [self.first(STORED), nearest]))


def labelled(label: str, plans: Iterable[Plan | None]) -> list[Contender]:
    """Contenders with one label, of what there is."""
    return [Contender(plan, frozenset({label})) for plan in plans if plan is not None]


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The plans without those that choose the same, whatever their origin."""
    kept: dict[frozenset[Choice], Plan] = {}
    for plan in plans:
        kept.setdefault(frozenset(plan.choices), plan)
    return list(kept.values())


def choose_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans choose the same, whatever their origin."""
    return set(one.choices) == set(other.choices)
