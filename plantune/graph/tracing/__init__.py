"""From a torch module to a layer graph.

- The way: `trace` runs the module on a `shadow` of it, `records` keeps what it calls, `extraction`
  reads that into a graph, and `extract` does all of it; `arguments` are those of the call.
- `eager_strides`: how eager's results are stored.
- What torch would hide from a trace: `autocast`, `custom_functions`, `own_backward`, `views`,
  `constants`, `averages`, `shapes`, `purity`, `validation`, `modes`.
- What a module keeps for itself: `held_objects`, `foreign_draws`, `leaks`, `memo`, `devices`.
- Where it stopped, and in which line: `untraced`, `lines`.
- `tape` is a trace as data, for another process.
"""
