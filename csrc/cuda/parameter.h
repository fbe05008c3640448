// Values of parameters as a kernel's epilogue reads them: where they are, in the parameter's dtype,
// or as float if a pass computed them.

#pragma once

#include "cuda/vector.h"

namespace plantune {

/// One value of each channel, or with stride 0 one for all.
struct Parameter {
  const void* from;
  int stride;
  int is_float;
};

/// It was written before the pass, or by a kernel that released no successor before its end: it may
/// be read before the wait for the kernel in front.
template <typename T>
__device__ __forceinline__ float load_parameter(const Parameter& parameter, int channel) {
  const int at = channel * parameter.stride;
  if (parameter.is_float) return __ldg(static_cast<const float*>(parameter.from) + at);
  return to_float(static_cast<const T*>(parameter.from)[at]);
}

}  // namespace plantune
