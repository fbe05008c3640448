"""Says whether a module computes something else in training mode than in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm


def _drops(layer: Any) -> bool:
    return bool(layer.p > 0)


def _drops_between(layer: Any) -> bool:
    """Of recurrent layers, whose dropout follows each but the last."""
    return bool(layer.dropout > 0 and layer.num_layers > 1)


def _drops_weights(layer: Any) -> bool:
    return bool(layer.dropout > 0)


def _keeps_statistics(layer: Any) -> bool:
    """Of batch norms: without any they use the batch's in either mode."""
    return layer.running_mean is not None or layer.running_var is not None


def _tracks_statistics(layer: Any) -> bool:
    return bool(layer.track_running_stats)


def _has_a_range(layer: Any) -> bool:
    return bool(layer.lower != layer.upper)


def _by_its_parts(layer: Any) -> bool:
    """Torch's code asks for the mode to choose between two ways to the same result."""
    return False


# Whether the mode of one of torch's layers counts, where its code reads it in any case.
RULES: Mapping[type[nn.Module], Callable[[Any], bool]] = {
    _DropoutNd: _drops,
    nn.RNNBase: _drops_between,
    nn.MultiheadAttention: _drops_weights,
    nn.RReLU: _has_a_range,
    nn.TransformerEncoder: _by_its_parts,
    nn.TransformerEncoderLayer: _by_its_parts,
    _BatchNorm: _keeps_statistics,
    _InstanceNorm: _tracks_statistics,
}


def heeds_training(module: nn.Module) -> bool:
    """Whether some part of it that is in training mode would compute something else in eval mode,
    as far as its class and its settings tell.
    """
    return any(each.training and _heeds_mode(each) for each in module.modules())


def _heeds_mode(module: nn.Module) -> bool:
    kinds = [kind for kind in type(module).__mro__ if kind not in nn.Module.__mro__]
    rule = next((RULES[kind] for kind in kinds if kind in RULES), None)
    if rule is not None:  # which knows torch's own code
        kinds = [kind for kind in kinds if not kind.__module__.startswith("torch.nn.modules.")]
        if rule(module):
            return True
    code = (f.__code__ for owner in (module, *kinds) for f in _functions_of(owner))
    return any(map(_names_mode, code))


def _functions_of(owner: object) -> Iterator[FunctionType]:
    """Those that get the module: a class method such as `from_float` reads another one's mode."""
    functions = (value for value in vars(owner).values() if isinstance(value, FunctionType))
    return (value for value in map(unwrap, functions) if isinstance(value, FunctionType))


def _names_mode(code: CodeType) -> bool:
    """In a function, or in one that is written inside of it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return "training" in code.co_names or any(map(_names_mode, inner))
