"""The given module: what of it a plan depends on, and who stands in for it.

- `live_state` watches its tensors, `module_signature` its Python state, `epoch` counts changes of
  dicts.
- `stands_in`, `forward_signature` and `copies` give its face to the tuned module; `mirror` follows
  a module that shares its weights.
- `modes`: whether its training mode makes a difference.
- `torch_internals` are private functions of torch that make looking cheap.
"""
