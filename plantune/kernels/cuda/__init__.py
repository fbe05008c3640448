"""What the families of CUDA kernels share.

- `cuda_family` builds and launches, with a `launcher` or a `vector_kernel`.
- `image_layout` turns images from one layout into the other.
- How blocks divide the work: `channel_slices`, `small_matrix`, `squeeze_tail`, `se_gradient`,
  `pool_window`; what matrix instructions expect of weights: `warp_mma`, `grouped_filters`.
"""
