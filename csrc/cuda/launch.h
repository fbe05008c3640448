// Programmatic dependent launch: a kernel may start before the one in front of it ended.
//
// Every kernel calls both, whether it is launched that way or not; they do nothing otherwise.

#pragma once

namespace plantune {

/// Waits until the kernel in front has ended and its writes can be seen. Nothing that an earlier
/// kernel wrote may be read, and nothing written, before this.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start as soon as there is room for its blocks.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace plantune
