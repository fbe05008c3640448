"""A convolution of given sizes, with what may follow it."""

from __future__ import annotations


def conv(x=(2, 5, 6, 7), outputs=9, kernel=(3, 3), parts=(), **geometry):
    """What emits it: `parts` are "residual", "offset", "relu", or ops with a value a channel."""

    def emit(b):
        y = b.conv(b.x(*x), b.w(outputs, x[1] // geometry.get("groups", 1), *kernel), **geometry)
        for part in parts:
            if part == "residual":
                y = b("add", y, b.x(*b.graph.types[y].shape))
            elif part == "offset":
                y = b("add", y, b.w(1))
            elif part == "relu":
                y = b("relu", y)
            else:
                y = b(part, y, b.w(outputs), axis=1)
        return y

    return emit


WHOLE_END = ("mul_channel", "add_channel", "residual", "relu", "offset")
