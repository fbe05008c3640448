"""Configs of kernels on CUTLASS main loops."""

from __future__ import annotations

from plantune.base.canonical import Attrs

MMA = Attrs(
    math="mma",
    tile_m=64,
    tile_n=64,
    tile_k=32,
    warp_m=32,
    warp_n=32,
    stages=2,
    split_k=1,
    split_mode="serial",
    swizzle=1,
)
