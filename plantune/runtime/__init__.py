"""Runs a plan: memory, program, tuned module. Imports neither the search nor the command line.

- The face: `load`, `asked`, `module`, `check`, `summary`, `stands_in`, `signatures`,
  `copies`, `sharing`, `mirror`, `modes`.
- A call: `plain_calls` answers those like the last one; of others `calls` asks `kinds` what runs
  them, which `choose` decided; `inputs`, `padding`, `vmaps` and `autograd` bring them there,
  `framework`, `runners`, `contest` and `trial` (of a `shipped` plan) run what no plan does.
- A plan made runnable: `schedule`, `loose`, `branches`, `memory_plan`, `binding` and `program`; on
  a GPU `captured`, `recorder`, `rehearsal`, `ends`, `left_out`, `streams`, `handles`; `planned` and
  `stock` have its instances.
- What must not be out of date: `weights`, `live_state`, `form`, `epoch`.
- Gradients: `gradients`, `flat`, `own_leaves`, `arrivals`, `exchange`, `claims`, `consistent`.
- Proofs: `recheck`, `cases`, `roundings`, `draws`, `distances`, `guess_race`.
- Of torch: `torch_internals`, `current_gpu`.
"""
