"""The optimizers whose step is a kernel of ours, and the numbers that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from plantune.runtime.watched.live_state import count_step
from plantune.training.lamb import LAMB

# plantune::kGroupNumbers, and the places and flags of plantune::Group.
GROUP_NUMBERS = 12
DECOUPLED, LARGEST, MAXIMIZE, NESTEROV, CORRECTS = 1, 2, 4, 8, 16
Group = Mapping[str, Any]
Numbers = tuple[Any, ...]


@dataclass(frozen=True)
class Rule:
    """`name` is that of plantune::Rule; `state` names the tensors that it keeps for a parameter in
    such a group, of which there is room for `least` in any case, and `numbers` are those of a group
    in the order of plantune::Group.
    """

    name: str
    state: Callable[[Group], tuple[str, ...]]
    numbers: Callable[[Group], Numbers]
    least: int
    keeps_step: bool = True

    def places(self, groups: Iterable[Group]) -> int:
        """How many tensors a parameter has at most."""
        return max([self.least, *(len(self.state(group)) for group in groups)])


def _sgd(group: Group) -> Numbers:
    flags = MAXIMIZE * bool(group["maximize"]) + NESTEROV * bool(group["nesterov"])
    return (
        *(group["lr"], group["momentum"], group["dampening"]),
        *(0.0, group["weight_decay"], flags),
    )


def _adam(group: Group) -> Numbers:
    flags = (
        DECOUPLED * bool(group["decoupled_weight_decay"])
        + LARGEST * bool(group["amsgrad"])
        + MAXIMIZE * bool(group["maximize"])
    )
    return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], flags)


def _lamb(group: Group) -> Numbers:
    flags = CORRECTS * bool(group["bias_correction"]) + MAXIMIZE * bool(group["maximize"])
    return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], flags)


def _momentum(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _moments(group: Group) -> tuple[str, ...]:
    more = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
    return ("exp_avg", "exp_avg_sq", *more)


ADAM = Rule("kAdam", _moments, _adam, 2)
RULES: Mapping[type[Optimizer], Rule] = {
    # A schedule may begin without momentum.
    SGD: Rule("kSgd", _momentum, _sgd, 1, keeps_step=False),
    Adam: ADAM,
    AdamW: ADAM,
    LAMB: Rule("kLamb", _moments, _lamb, 2),
}


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule of an optimizer; None of one that only its own step can take."""
    rule = RULES.get(type(optimizer))
    groups = optimizer.param_groups
    if rule is None or any(group.get("differentiable") for group in groups):
        return None
    return None if has_hooks(optimizer) else rule


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether Python of the user's runs around each step."""
    tables = (
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
    )
    return any(hook is not count_step for table in tables for hook in table.values())


def row_of(rule: Rule, group: Group) -> tuple[float, ...]:
    """The numbers of a group as they are now; 0 for one that is on a GPU."""
    numbers = (0.0 if _is_on_gpu(number) else float(number) for number in rule.numbers(group))
    row = tuple(numbers)
    return (*row, *[0.0] * (GROUP_NUMBERS - len(row)))


def on_gpu(rule: Rule, group: Group) -> dict[int, Tensor]:
    """Those that are on a GPU, by their place in the row: asking for their values would wait."""
    return {at: n for at, n in enumerate(rule.numbers(group)) if _is_on_gpu(n)}


def _is_on_gpu(number: Any) -> bool:
    return isinstance(number, Tensor) and number.is_cuda
