"""Warpgroup products of one width, as source that `csrc/cuda/hopper_mma.h` asks for.

CUTLASS has all of them, in headers that take NVRTC 0.8 s of each kernel's 1.0 s.
"""

from __future__ import annotations

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
# Of float32 a product reads what tf32 has.
FACTORS = {**ELEMENTS, "float32": "float"}
NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32"}
# After the sums: both descriptors, and whether there are sums to add to. No operand is negated; B
# may be transposed, so that its rows are steps of the reduction.
PRODUCT = """template <>
struct plantune::Product<{element}, {columns}> {{
  static __device__ __forceinline__ void start(uint64_t a, uint64_t b, int adds,
                                               float (&d)[{sums}]) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{adds}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{name}.{name} "
        "{{{places}}}, %{a}, %{b}, p, 1, 1{transposed};\\n"
        "}}\\n"
        : {operands}
        : "l"(a), "l"(b), "r"(adds));
  }}
}};
"""


# It adds always.
REGISTER_PRODUCT = """template <>
struct plantune::RegisterProduct<{element}, {columns}> {{
  static __device__ __forceinline__ void start(const uint32_t (&a)[4], uint64_t b,
                                               float (&d)[{sums}]) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.eq.b32 p, 0, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} "
        "{{{places}}}, {{{rows}}}, %{b}, p, 1, 1, 1;\\n"
        "}}\\n"
        : {operands}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }}
}};
"""
PLANE_PRODUCT = """template <>
struct plantune::PlaneProduct<{element}, {columns}> {{
  static __device__ __forceinline__ void start(const uint32_t (&a)[4], uint64_t b, int adds,
                                               float (&d)[{sums}]) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{adds}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} "
        "{{{places}}}, {{{rows}}}, %{b}, p, 1, 1, {transposed};\\n"
        "}}\\n"
        : {operands}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
  }}
}};
"""


def product(dtype: str, columns: int, *, transposed: bool = False) -> str:
    """Source to put after that header, for products of so many columns, a multiple of 8. Those of
    float32 have no transposed operands.
    """
    sums, single = columns // 2, dtype == "float32"
    places = {"a": sums, "b": sums + 1, "adds": sums + 2, "depth": 8 if single else 16}
    ends = "" if single else f", 0, {int(transposed)}"
    return PRODUCT.format(**_sums(dtype, columns), **places, transposed=ends)


def register_product(dtype: str, columns: int) -> str:
    """The same for products whose A comes from registers, and whose B is transposed."""
    return REGISTER_PRODUCT.format(**_sums(dtype, columns), **_registers(columns))


def plane_product(dtype: str, columns: int, *, transposed: bool = False) -> str:
    """The same for products whose A comes from registers, and which may begin a sum."""
    places = {**_registers(columns), "adds": columns // 2 + 5, "transposed": int(transposed)}
    return PLANE_PRODUCT.format(**_sums(dtype, columns), **places)


def _registers(columns: int) -> dict[str, object]:
    """Operands after the sums: A in four registers, and B."""
    sums = columns // 2
    return {"rows": ", ".join(f"%{sums + i}" for i in range(4)), "b": sums + 4}


def _sums(dtype: str, columns: int) -> dict[str, object]:
    """Names, and the operands that are sums."""
    sums = columns // 2
    return {
        "element": FACTORS[dtype],
        "name": NAMES[dtype],
        "columns": columns,
        "sums": sums,
        "places": ", ".join(f"%{i}" for i in range(sums)),
        "operands": ", ".join(f'"+f"(d[{i}])' for i in range(sums)),
    }
