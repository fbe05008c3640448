"""Average and max pooling, and the mean over an image's pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plantune.graph import Node, Step, TensorType
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Parts, refuse
from plantune.kernels.cuda.pool_window import PoolWindow
from plantune.kernels.cuda.vector_kernel import ELEMENTS

MAX_POOLS = ("max_pool2d", "max_pool2d_taps")
POOLS = ("avg_pool2d", *MAX_POOLS)
# A row of so many channels of a pixel is worth a block of its own.
SLICE_MIN = 64
MEAN = "PixelMean<{elements}, {channels}, {slice}, {pixels}, {threads}>"


@dataclass(frozen=True)
class PoolParts(Parts):
    """A pool, or the mean of an image's pixels, from x to y."""

    node: Node
    x: TensorType
    y: TensorType

    @property
    def elements(self) -> str:
        """The element types of x and y in C++."""
        return f"{ELEMENTS[self.x.dtype]}, {ELEMENTS[self.y.dtype]}"

    @property
    def is_mean(self) -> bool:
        return self.node.op == "mean"

    @property
    def window(self) -> PoolWindow:
        places = self.node.op in MAX_POOLS and self.node.outputs[-1] in dict(self.step.outputs)
        return PoolWindow(self.node, self.x, self.y, self.x.dtype, self.y.dtype, places)


class Pool(CudaFamily[PoolParts]):
    """Config: `layout` of images; `threads` of a block."""

    name: ClassVar = "pool"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> PoolParts:
        node = step.nodes[0]
        known = len(step.nodes) == 1 and node.op in (*POOLS, "mean")
        refuse({"only one pool, or the mean of an image's pixels": not known})
        x, y, mean = step.types[node.inputs[0]], step.types[node.name], node.op == "mean"
        pixels = len(x.shape) == 4 and node.attrs.get("dims") == (2, 3)
        refuse(
            {
                **vector_kernel.not_an_element(x.dtype),
                **vector_kernel.not_an_element(y.dtype),
                "there are no images": x.numel == 0 or node.inputs[0] in step.constants,
                "only the places are read": node.name not in dict(step.outputs),
                "the mean is not that of an image's pixels": mean and not pixels,
                f"channels are read by eights, got shape {x.shape}": pixels and x.shape[1] % 8,
            }
        )
        return PoolParts(step, node, x, y)

    def why_not_config(self, parts: PoolParts, config: Attrs, arch: Arch) -> str | None:
        if parts.is_mean and config["layout"] != "nhwc":
            return "the mean is taken along the pixels of nhwc images"
        return None

    def estimate_us(self, parts: PoolParts, config: Attrs, arch: Arch) -> float:
        """Whatever takes longest: memory, to compare or add, or in nchw to read single elements."""
        if parts.is_mean:
            return super().estimate_us(parts, config, arch)
        cost, window = arch.cost(self.name), parts.window
        read, taken = window.read(config)
        found = "places" if window.places else "elements"
        times = [
            parts.step.traffic_bytes / cost["bytes_per_us"],
            parts.y.numel * taken / cost[f"{found}_per_us"],
        ]
        if config["layout"] == "nchw":
            times.append(parts.y.numel * read / cost["reads_per_us"])
        return cost["launch_us"] + max(times) * self.slowdown(parts, arch)

    def source(self, parts: PoolParts, config: Attrs, arch: Arch) -> str:
        if not parts.is_mean:
            window, threads = parts.window.source(config), config["threads"]
            if parts.window.tile(config) == (1, 1):
                return vector_kernel.source(self.name, "Pool<Window>", threads, window)
            return vector_kernel.source("pool_tile", "PoolTile<Window>", threads, window)
        _, channels, height, width = parts.x.shape
        mean = MEAN.format(
            elements=parts.elements,
            channels=channels,
            slice=_slice(parts, config),
            pixels=height * width,
            threads=config["threads"],
        )
        return vector_kernel.source(self.name, mean, config["threads"])

    def bind(self, parts: PoolParts, config: Attrs, frame: Frame) -> Binding:
        node, threads = parts.node, int(config["threads"])
        rest: tuple[str | int | None, ...] = ()
        if parts.is_mean:
            n, channels = parts.x.shape[:2]
            blocks = n * (channels // _slice(parts, config))
        else:
            count = parts.window.threads(config)
            rest = (node.outputs[-1] if node.op in MAX_POOLS else None, count)
            blocks = -(-count // threads)
        kernel = vector_kernel.VectorKernel(frame.built, blocks, threads)
        arguments = (node.inputs[0], node.name, *rest)
        return vector_kernel.bound([kernel], parts.step, frame, arguments, node.inputs[:1])


def _slice(parts: PoolParts, config: Attrs) -> int:
    """Channels of one block of a mean, such that its threads have something to do; 0 for none."""
    _, channels, height, width = parts.x.shape
    vector, threads = vector_kernel.width(parts.x), int(config["threads"])
    slices = [size for size in range(8, channels + 1, 8) if channels % size == 0]
    fitting = [size for size in slices if size // vector <= threads]
    filled = threads * vector // (height * width)
    return next((size for size in fitting if size >= max(SLICE_MIN, filled)), max(fitting))


FAMILY = Pool()
