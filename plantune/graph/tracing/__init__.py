"""From a torch module to a layer graph.

- The way: `trace` runs the module on a `shadow` of it, `records` keeps what it calls, `extraction`
  reads that into a graph, and `extract` does all of it; `arguments` are those of the call.
- `eager_strides`: how eager's results are stored.
- What torch would hide from a trace: `autocast`, `custom_functions`, `own_backward`, `views`,
  `constants`, `averages`, `shapes`, `purity`, `validation`, `modes`.
- What a forward does beside what it returns: `side_effects`; where a module has its tensors:
  `devices`.
- Where it stopped, and in which line: `untraced`, `lines`.
- `tape` is a trace as data, for another process.
"""
