"""Linear layers of few rows: each element of the result is a dot product of a warp."""

from __future__ import annotations

import math
from typing import ClassVar

from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.patterns.linear_layer import LinearLayer, linear_layer_of

THREADS, WARPS = 256, 8
# Beyond it the same weights are read again and again.
ROWS_MAX = 2048
KERNEL = "Linear<Operands, {rows}, {columns}, {depth}, {width}, {threads}, {expression}>"


class Linear(CudaFamily[LinearLayer]):
    """Config: a block makes `tile_n` columns of so many `rows`."""

    name: ClassVar = "linear"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> LinearLayer:
        layer = linear_layer_of(step)
        attrs, sizes = layer.product.attrs, layer.sizes
        turned = attrs["transpose_a"] or not attrs["transpose_b"]
        refuse(
            {
                "rows of both matrices must be contiguous along the inner axis": turned,
                **vector_kernel.not_an_element(*_dtypes(layer)),
                "there is nothing to multiply": 0 in sizes,
                f"it is for {ROWS_MAX} rows at most, got {sizes[0]}": sizes[0] > ROWS_MAX,
            }
        )
        return layer

    def why_not_config(self, parts: LinearLayer, config: Attrs, arch: Arch) -> str | None:
        rows, m = config["rows"], parts.sizes[0]
        return first_reason(
            {
                f"half of {rows} rows hold the {m} that are there": rows >= 2 * m,
                f"{WARPS} warps do not divide {config['tile_n']} columns": config["tile_n"] % WARPS,
            }
        )

    def threads(self, parts: LinearLayer, config: Attrs) -> int:
        return THREADS

    def estimate_us(self, parts: LinearLayer, config: Attrs, arch: Arch) -> float:
        """Each warp loads the rows and the columns of its own tile."""
        cost, type_ = arch.cost(self.name), parts.step.types[parts.a]
        rows, columns = int(config["rows"]), int(config["tile_n"]) // WARPS
        loaded = math.prod(parts.sizes) * (1 / rows + 1 / columns) * type_.torch_dtype.itemsize
        work = cost["element_us"] * rows * columns + loaded / cost["loaded_bytes_per_us"]
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: LinearLayer, config: Attrs, arch: Arch) -> str:
        depth, types = parts.sizes[2], parts.step.types
        chain = (parts.activation,) if parts.activation else ()
        kernel = KERNEL.format(
            rows=config["rows"],
            columns=config["tile_n"] // WARPS,
            depth=depth,
            width=math.gcd(*(vector_kernel.width(types[v]) for v in (parts.a, parts.b)), depth),
            threads=THREADS,
            expression=expression(chain),
        )
        elements = ", ".join(vector_kernel.ELEMENTS[dtype] for dtype in _dtypes(parts))
        before = f"{functors(chain)}using Operands = plantune::Types<{elements}>;\n"
        return vector_kernel.source(self.name, kernel, THREADS, before)

    def bind(self, parts: LinearLayer, config: Attrs, frame: Frame) -> Binding:
        m, n, _ = parts.sizes
        blocks = -(-n // int(config["tile_n"])), -(-m // int(config["rows"]))
        kernel = vector_kernel.VectorKernel(frame.built, blocks, THREADS)
        arguments = (parts.a, parts.b, parts.bias, parts.y, m, n)
        return vector_kernel.bound([kernel], parts.step, frame, arguments, (parts.a, parts.b))


def _dtypes(layer: LinearLayer) -> tuple[str, ...]:
    """Of both factors, the bias and the result."""
    operands = (layer.a, layer.b, layer.bias or layer.b, layer.y)
    return tuple(layer.step.types[name].dtype for name in operands)


FAMILY = Linear()
