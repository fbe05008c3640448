"""Measuring candidates: first whether they are right, then how long they take.

- Proofs: `scenes` and `inputs` make data, `kept` for a while, `trial` and `step_alone` run a
  candidate on it, `numerics` judges.
- Times: `timing` by the clocks of `watches`; `roofline` is the least that a step can take.
- Whole networks: `programs` and `subject`; `racing` has the race.
- The machine: `machine_state`, `room`, `threads`, `limits`; `kernel_samples` shows what compiles
  here.
- `worker` is the process in which all of it happens.
"""
