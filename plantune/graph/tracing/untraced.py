"""What is said of a forward that raised an error while it was traced."""

from __future__ import annotations

from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.shadow import DOOR

# What torch says where a shape, or the way through a forward, depends on a tensor's values.
BY_VALUE = "it asks for a tensor's values. A forward must not branch or loop on them"
PACKS = (
    "it packs sequences, whose sizes are the values of lengths. Give the layer the padded sequence "
    "and take the last state of each by its length"
)
SAID = dict.fromkeys(("to number", "nonzero", "meta tensors", "data-dependent"), BY_VALUE)
SAID["'lengths' argument"] = PACKS
SAID["_nested_tensor_from_mask"] = (
    "it makes nested tensors. Make the nn.TransformerEncoder with enable_nested_tensor=False"
)
SAID["does not have a grad_fn"] = "it takes gradients itself, by torch.autograd"


def why_untraced(error: Exception, function: str, arguments: Arguments) -> str:
    """Most errors of unknown kinds are the caller's own, such as an image of another size: the
    text names the call. `function` is the torch.autograd.Function in which it was raised, if any.
    """
    what = f"{function}, a Function" if function else "it"
    first = str(error).strip().partition("\n")[0].rstrip(".")
    reason = next((reason for words, reason in SAID.items() if words in first), None)
    op, without_memory, _ = first.partition(": attempted to run this operator with Meta tensors")
    if without_memory and reason is None:
        reason = f"torch does not know which shapes {op} makes"
    if reason is not None:
        return f"torch cannot trace {what}: {reason}. {DOOR}"
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return (
        f"torch cannot trace {what} in the call {arguments.as_written()}: {said}. If the module "
        f"itself raises this too, the call is wrong; else {DOOR}"
    )
