"""Images that change between nchw and nhwc, by a kernel of ours."""

from __future__ import annotations

import itertools

import pytest
import torch

from plantune.devices.cuda.build import compile_cuda
from plantune.kernels.cuda.image_layout import COUNT_MAX, Elements, design_of, layout_change
from plantune.space.arch import load_arch

# Channels and pixels of an image, and bytes of an element: each kernel, whole words and not.
SIZES = {
    "words both ways": (64, 16 * 16, 2),
    "fewer channels than a warp takes": (24, 56 * 56, 2),
    "float32": (40, 30 * 30, 4),
    "pixels that are no words": (512, 7 * 7, 2),
    "pixels that are half words": (136, 14 * 14, 2),
    "three planes": (3, 64 * 64, 4),
    "three planes of an odd size": (3, 97 * 97, 2),
    "bytes": (3, 224 * 224, 1),
    "doubles": (8, 5 * 6, 8),
    "odd pixels of large images": (72, 225 * 225, 2),
    "one pixel more than a block has": (5, 2049, 2),
}
DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def kernel_of(rows, columns, size_bytes):
    design = design_of(rows, columns, Elements.moved(size_bytes))
    return None if design is None else design.kernel.partition("<")[0]


@pytest.mark.parametrize(
    ("rows", "columns", "kernel"),
    [
        (64, 256, "TurnInRegisters"),
        (512, 49, "GatherRows"),
        (49, 512, "ScatterColumns"),
        (3, 4096, "ScatterColumns"),
        (4096, 3, "GatherRows"),
        (64, 225 * 225, "TurnInRegisters"),
        (257, 1023, None),
    ],
)
def test_each_shape_has_its_kernel(rows, columns, kernel):
    """Words enter and leave where they can; torch has what would be single elements both ways."""
    assert kernel_of(rows, columns, 2) == kernel


@pytest.mark.parametrize("size_bytes", [1, 2, 4, 8])
def test_words_begin_where_every_row_and_column_does(size_bytes):
    """Of an image of any size: a word that began elsewhere would be an illegal address."""
    for rows, columns in itertools.product([1, 2, 3, 8, 24, 49, 64, 130, 196], repeat=2):
        design = design_of(rows, columns, Elements.moved(size_bytes))
        if design is None:
            continue
        kernel, _, numbers = design.kernel.rstrip(">").partition("<")
        _, _, inward, outward, *tile = numbers.split(", ")
        inward, outward, tile = int(inward), int(outward), [*map(int, tile)]
        whole = rows * columns
        if kernel == "GatherRows":
            assert [rows % outward, tile[0] % outward, whole % inward] == [0, 0, 0]
            assert (rows % tile[0]) * columns % inward == tile[0] * columns % inward == 0
            assert columns <= tile[1]
        elif kernel == "ScatterColumns":
            assert [columns % inward, tile[1] % inward, whole % outward] == [0, 0, 0]
            assert (columns % tile[1]) * rows % outward == tile[1] * rows % outward == 0
            assert rows <= tile[0]
        else:
            assert (columns % inward, rows % outward) == (0, 0)
        assert max(inward, outward) * size_bytes <= 16


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("arch", ["sm70", "sm75", "sm80", "sm90", "sm120"])
def test_it_builds_within_the_limits_of_a_chip(name, arch):
    rows, columns, size_bytes = SIZES[name]
    for sides in ((rows, columns), (columns, rows)):
        design = design_of(*sides, Elements.moved(size_bytes))
        usage = compile_cuda(design.source, load_arch(arch)).usage["run"]
        assert usage.spill_bytes == 0
        assert usage.shared_bytes <= 48 << 10
        assert usage.registers * 256 <= 1 << 16


@pytest.mark.parametrize("shape", [(2, 3), (0, 3, 4, 4), (1, 1 << 11, 1 << 11, 1 << 10)])
def test_what_it_does_not_take(shape):
    assert layout_change(shape, torch.float16, "nhwc", load_arch("sm90")) is None


def test_complex_numbers_of_16_bytes_are_left_to_torch():
    assert layout_change((2, 8, 4, 4), torch.complex128, "nhwc", load_arch("sm90")) is None
    assert COUNT_MAX < 1 << 32  # sizes are unsigned


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("name", SIZES)
def test_every_element_comes_where_it_belongs(name, images):
    channels, pixels, size_bytes = SIZES[name]
    arch = load_arch("sm{}{}".format(*torch.cuda.get_device_capability()))
    formats = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
    x = torch.randint(0, 256, (images, channels, 1, pixels * size_bytes), dtype=torch.uint8)
    x = x.cuda().view(DTYPES[size_bytes])
    for layout, before in (("nhwc", "nchw"), ("nchw", "nhwc")):
        source = x.contiguous(memory_format=formats[before])
        guarded = torch.full((x.numel() + 64,), 77, dtype=torch.uint8, device="cuda").repeat(
            size_bytes
        )
        out = guarded[32 * size_bytes : -32 * size_bytes].view(x.dtype)
        strides = torch.empty_like(x, memory_format=formats[layout]).stride()
        out = out.as_strided(x.shape, strides)
        change = layout_change(tuple(x.shape), x.dtype, layout, arch)
        assert change.turns(source, out)
        change.launch(torch.cuda.current_stream().cuda_stream, out, source)
        equal = out.contiguous().view(torch.uint8) == x.contiguous().view(torch.uint8)
        assert equal.all(), f"{int((~equal).sum())} bytes differ"
        edges = torch.cat([guarded[: 32 * size_bytes], guarded[-32 * size_bytes :]])
        assert (edges == 77).all()


@pytest.mark.gpu
def test_what_is_not_written_from_a_word_on_is_left_to_torch():
    arch = load_arch("sm{}{}".format(*torch.cuda.get_device_capability()))
    change = layout_change((1, 8, 4, 4), torch.float16, "nhwc", arch)
    out = torch.empty(1, 8, 4, 4, dtype=torch.float16, device="cuda")
    shifted = torch.empty(129, dtype=torch.float16, device="cuda")[1:].view(1, 8, 4, 4)
    pixels = out.contiguous(memory_format=torch.channels_last)
    assert change.turns(out, pixels)
    assert change.turns(shifted, pixels)  # it is read one by one
    assert not change.turns(pixels, shifted)
    assert not change.turns(pixels, out)
    assert not change.turns(out.transpose(2, 3), pixels)
