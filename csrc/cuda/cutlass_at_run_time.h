// CUTLASS as NVRTC compiles it. Comes before any of its headers.

#pragma once

// CCCL's lists of types are written out up to 16 long for NVRTC and 10 long for nvcc; the longer ones
// take 0.5 of the 0.65 CPU seconds that its type traits cost each source (EPYC, NVRTC 13.0,
// 2026-11-23), and the binaries are the same.
#ifndef _CCCL_META_UNROLL_LIMIT
#define _CCCL_META_UNROLL_LIMIT 10
#endif

#include "cute/config.hpp"
// CUTLASS 4.2 declares std::tuple_size with a pack, as the headers of CUDA 13.0 do; those of 13.2
// declare it with one parameter, and NVRTC refuses the two together. No kernel binds parts of CuTe's
// tuples to names, which is all that needs it.
#undef CUTE_STL_NAMESPACE_IS_CUDA_STD
#include "cutlass/cutlass.h"
#include "cutlass/aligned_buffer.h"
#include "cutlass/array.h"
#include "cutlass/functional.h"
#include "cutlass/matrix_coord.h"
#include "cutlass/numeric_conversion.h"
