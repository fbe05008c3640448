"""The functions of the table as both kinds of kernels compute them, against torch in float64.

The header for CUDA is compiled for the CPU, too: its formulas are the same there.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from plantune.graph.ops.functions import FUNCTIONS
from plantune.kernels.cpu.cxx import cxx_compiler, function, load_library

FOR_CPU = '#include "cpu/functions.hpp"\n'
FOR_CUDA = """#include <math.h>
#define __device__
#define __forceinline__ inline
#define __expf expf
#define __fdividef(a, b) ((a) / (b))
#define __CUDA_ARCH__ 700
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
#include "cuda/arithmetic.h"
"""
BODY = """extern "C" void {name}(const float* a, const float* b, float* y, int count) {{
  for (int i = 0; i < count; ++i) {{
    const float first = a[i], second = b[i];
    (void)second;
    y[i] = {expression};
  }}
}}
"""
GRADIENTS = [name for name, each in FUNCTIONS.items() if each.derivative is not None]
EDGES = [0.0, 3.0, -3.0, 6.0, 1.0, -1.0, 20.0, 25.0, -25.0, 80.0, -80.0, 1e-6, -1e-6, math.nan]


def source(header: str, expressions: dict[str, str]) -> str:
    bodies = (BODY.format(name=n, expression=cxx) for n, cxx in expressions.items())
    return header + "".join(bodies)


def computed(library: ctypes.CDLL, name: str, *inputs: torch.Tensor) -> torch.Tensor:
    """What the compiled function makes of one input or two."""
    address = ctypes.c_void_p
    run = function(library, name, [address, address, address, ctypes.c_int])
    y = torch.full_like(inputs[0], math.nan)
    run(inputs[0].data_ptr(), inputs[-1].data_ptr(), y.data_ptr(), y.numel())
    return y


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    if cxx_compiler() is None:
        pytest.skip("it compiles C++")
    values = {f"f_{name}": each.cxx.format("first") for name, each in FUNCTIONS.items()}
    slopes = {
        f"g_{name}": each.derivative.cxx.format("first", "second")
        for name, each in FUNCTIONS.items()
        if each.derivative is not None
    }
    return {
        "cpu": load_library(source(FOR_CPU, values)),
        "cuda": load_library(source(FOR_CUDA, values | slopes)),
    }


def numbers() -> torch.Tensor:
    return torch.cat([torch.randn(500) * 3, torch.tensor(EDGES)])


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_that_of_torch(libraries, name, kind):
    x = numbers()
    found = computed(libraries[kind], f"f_{name}", x)
    exact = FUNCTIONS[name].torch(x.double())
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_derivative_is_that_of_torch(libraries, name):
    dy, x = torch.randn_like(numbers()), numbers()
    derivative = FUNCTIONS[name].derivative
    read = x if derivative.of_argument else FUNCTIONS[name].torch(x)
    found = computed(libraries["cuda"], f"g_{name}", dy, read)
    exact = derivative.torch(dy.double(), read.double())
    torch.testing.assert_close(found.double(), exact, rtol=3e-6, atol=2e-6, equal_nan=True)
