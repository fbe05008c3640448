"""Weights in the form in which kernels read them.

- `constants` says which order and dtype a kernel asks for; `preparation` fills all of them in one
  launch, as `jobs`.
- `copies` moves many tensors at once; `pitch` reads slices of channels where they are.
"""
