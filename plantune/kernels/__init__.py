"""Kernel families: what can run a step, how, and why not.

- What a family is, and how it is found and built: `family`, `cuda_family`, `registry`, `legality`,
  `build`, `samples`, `chips`.
- Weights in the form that a kernel reads: `constants`, `folded`, `jobs`, `preparation`.
- Sources, launches and memory: `rendering`, `launcher`, `vector_kernel`, `cxx`, `copies`, `pitch`,
  `huge_pages`.
- The libraries' own kernels: `torch_ops`, `onednn`.
- Shared by some families: `channel_slices`, `direct`, `small_matrix`, `warp_mma`, `se_gradient`; by
  those of recurrent layers, `scan_family`, `scan_gradient`, `scan_division`, `scan_launches`,
  `gru_encoder`, `translation`; by those on CUTLASS and on Hopper, the folders `cutlass` and
  `hopper`.
- `patterns` reads steps for the families; `families` has one file for each of them.
"""
