"""What every other part may use and what uses none of them.

- `outcome`: what became of a candidate; errors are in `plantune/errors.py`.
- Values: `canonical` and `jsonable` write them as JSON; `distance` and `tolerances` compare
  results.
- Files: `paths` finds them, `files` reads and writes those that options name, `atomic_files` writes
  them whole, `blobs` keeps bytes in the cache, `build_log` keeps what compilers say.
- What is said: `warning` warns, `given` refuses arguments, `nearest` finds a mistyped name,
  `storage_urls` hides passwords.
- The process: `environment_variables` reads these; `scopes`, `generators` and `op_mode` are of
  torch's state.
"""
