"""CUDA C++ kernels without a toolkit: NVRTC compiles them, the driver loads and launches them."""
