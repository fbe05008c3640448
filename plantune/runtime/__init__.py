"""Runs a plan: memory, program, tuned module. Imports neither the search nor the command line.

- The face: `load` makes a tuned module of `module`, or of `sharing`; `asked` refuses what it cannot
  take; `check` compares it with the reference, `summary` says what runs.
- `calls` answers a call; `program` is a plan made runnable, `captured` a program on a GPU;
  `watched` sees changes of the given module; `proof` shows that a plan computes the network.
"""
