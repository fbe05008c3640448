"""Training as one step: forward, loss, backward and optimizer.

- The step: `step`, `captured_step`, `replays`, `loss_pass`, `models`, `caller_settings`,
  `random_state`, `own_state`; what it refuses: `given`, `second_gradients`; `turns` says why it is
  not captured.
- From gradients to weights: `update`, `device_update`, `capturable_update`, `rules`, `lamb`,
  `loss_scale`.
- Several processes: `data_parallel`, `ranks`, `reduce`, `one_plan`, `groups`, `watch`.
"""
