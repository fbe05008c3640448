"""What steps compute after a convolution, by the names of its parts."""

from __future__ import annotations


def ended(b, x, y, parts):
    """`y`, which a convolution of `x` made, with the parts that are named; before an offset it may
    leave, too.
    """
    width = b.graph.types[y].shape[1]
    if "scale" in parts:
        y = b("mul_channel", y, b.w(width), axis=1)
    if "scalar" in parts:
        y = b("mul", y, b.w(1))
    if "bias" in parts:
        y = b("add_channel", y, b.w(width), axis=1)
    if "residual" in parts:
        y = b("add", y, b.x(*b.graph.types[y].shape))
    if "input" in parts:
        y = b("add", y, x)
    if "relu" in parts:
        y = b("relu", y)
    before = y
    if "offset" in parts:
        y = b("add", y, b.w(1))
    if "apart" in parts:
        y = b.apart(y)
    return (before, y) if "unshifted" in parts else y
