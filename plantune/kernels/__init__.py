"""Kernel families: what can run a step, how, and why not.

- What a family is, and how it is found and built: `family`, `registry`, `legality`, `build`,
  `chips`, `rendering`.
- `resolved` is a step with the candidate that runs it, whose family was found by its name, once.
- What changes of layout and casts cost: `conversions`.
- `torch_ops` runs each op by the framework, `one_call` two of them.
- `patterns` reads steps for the families; `weights` prepares what they read.
- What some of them share: `cpu`, `cuda`, `cutlass`, `hopper`, `recurrent`.
- `families` has one file for each.
"""
