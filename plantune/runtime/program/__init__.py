"""A plan made runnable: launches in an order, in planned memory.

- `program` binds the kernels by `binding`, in the order of `schedule` and `loose`, side by side
  where `branches` allows it, in the memory of `memory_plan` and `flat`.
- `weights` and `skipped_steps`: what a pass computes first, or need not launch; `conversions`
between
  layouts.
- `gradients`, `arrivals` and `exchange` are of a backward pass; `streams` are its own;
  `result_strides` say how results come.
"""
