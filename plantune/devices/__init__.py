"""The machine: its processors, and what a measurement on them depends on.

- `device` is what measuring and running need of a processor; `gpus` lists those that are here.
- `host` is the CPU and its compiler; `machine` is the environment that stored plans are matched by.
- `cuda` has NVIDIA's libraries: NVRTC, the driver, graphs.
"""
