"""Finds the plan: which candidates to measure, how to cover the graph, which plan to keep.

- From start to end: `session` has a `search` for what is `sought`. `start` is its first half, up to
  measured steps; the second one is in `contenders`, which ranks and races whole plans. All share a
  `run`; `results` has what goes in and comes out, `policy` the numbers that were chosen.
- Which candidate is next: `listing` makes them, `knowledge` has all that is known of them, by
  `clusters`, `queue`, `costs` and `studies`; `covers` finds the best ones by it.
- Measuring: `step_search` asks for candidates, `worker_pool` gives them to the measurers of
  `measuring`, `builds` compiles ahead, `budget` and `machine_log` watch the time and the machine.
- How it ends: `keeping` what was found, `endings` without a plan of its own, `first_interrupt` by
  Ctrl-C.
- Searches on several GPUs and hosts: `shared` and `sharing`, what one does for others.
- For a chip that is not here: `predict` and `predicted`.
"""
