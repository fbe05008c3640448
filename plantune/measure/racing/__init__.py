"""Whole networks: a plan raced against the framework's ways.

- `race` times the `entrants` in turns, `run_off` adds rounds where the first ones say too little.
- `ways` are the framework's ways at their best; `inductor` prepares torch's compiler.
- `latency`, `phases` and `training_calls` are what a race times beside queued calls.
"""
