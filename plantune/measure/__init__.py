"""Measuring candidates: first whether they are right, then how long they take.

- The worker process: `client` asks it, `worker` and `work` answer, by `protocol`; `child`,
  `reserve`, `builder` and `limits` start it, replace it and keep it in bounds.
- Proofs: `scenes` and `inputs` make data, which is `kept`; `trial` and `step_alone` run a
  candidate on it, `numerics` judges.
- Times: `timing` by the clocks of `watches`, `latency`, `phases`, `roofline`.
- Whole networks: `programs`, and the race in `race`, `entrants`, `ways`, `subject`,
  `training_calls`.
- The machine: `machine_state`, `room`, `threads`, `turns`.
"""
