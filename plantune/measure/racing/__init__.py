"""Whole networks: a plan raced against the framework's routes.

- `routes` are the framework's, each at its best; `built_routes` makes them and the plan ready, and
  proves each; `inductor` prepares torch's compiler.
- `race` times them in turns, `run_off` adds rounds where the first ones say too little.
- `latency`, `call_parts` and `training_calls` are what a race times beside queued calls.
"""
