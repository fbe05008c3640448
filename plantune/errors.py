"""Every error plantune raises on purpose, in one tree.

A message says what happened, where, what was got and what to do. Only the search turns an expected
failure into a rejected candidate; everything else is raised.
"""

from __future__ import annotations


class PlantuneError(Exception):
    """Base of every error raised on purpose."""


class UnknownNetwork(PlantuneError):
    """A name is not in the registry of reference networks; the message has the names that are."""


class UnsupportedModule(PlantuneError):
    """A module holds an operation that the layer graph cannot express."""


class InvalidGraph(PlantuneError):
    """A layer graph breaks one of its own rules."""


class InvalidSearchSpace(PlantuneError):
    """A search-space file holds something that plantune does not know."""


class InvalidPlan(PlantuneError):
    """A plan does not fit its graph, or its text is not a plan."""


class IllegalCandidate(PlantuneError):
    """A kernel family cannot run this step with this config; the message is the reason."""


class BuildError(PlantuneError):
    """A kernel did not compile."""


class InputMismatch(PlantuneError, TypeError):
    """An input's device, dtype or rank is not what the module was made for."""


class WeightsChanged(PlantuneError, RuntimeError):
    """A weight was changed in place between a forward pass and its backward pass."""


class UnsupportedDevice(PlantuneError, ValueError):
    """A device on which plantune runs no plan."""
