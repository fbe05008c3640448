"""The measuring process, and how others talk to it.

- `client` asks, `worker_process` and `work` answer, by `protocol`.
- `child`, `reserve` and `builder` start processes and replace them; `turns` keeps them from timing
  at the same time.
"""
