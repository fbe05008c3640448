"""Finds the plan: which candidates to measure, how to cover the graph, which plan to keep.

- From start to end: `session` calls `search`, which starts by `warm_start`, measures by
  `step_search`, then ranks and races by `stages`, `ranking` and `judgement`; `results` has what
  goes in and comes out, `policy` the numbers that were chosen.
- Which candidate is next: `clusters`, `queue`, `costs`, `best_cover`, `studies`; covers are made
  by `plantune/plans/planner`.
- Measuring: `worker_pool` gives candidates to the measurers of `measuring`, `builds` compiles
  ahead, `budget` and `machine_log` watch the time and the machine, `elsewhere` uses other GPUs.
- What is kept and known: `keeping`, `kept_times`, `known`; what is not ranked: `dearer`.
- How it ends: `endings` without a plan of its own, `first_interrupt` by Ctrl-C.
- Searches on several GPUs and hosts: the folder `shared`.
- For a chip that is not here: `predict`.
"""
