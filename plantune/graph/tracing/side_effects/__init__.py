"""What a forward does beside what it returns, which no later call of a plan would do again.

- `watch` has all of it, as the trace takes it.
- Refused, and put back: numbers drawn from `generators`, `objects` of the module that moved.
- Taken away: tensors of the trace in `caches` of the code's own. Those in the module's own
  `containers` never reach it.
"""
