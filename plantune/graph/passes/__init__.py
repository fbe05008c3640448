"""Passes over a layer graph, each from one graph to another.

- `differentiate` adds the backward pass; `recompute`, `own_gradients`, `apart` and `taps` say what
  it computes anew, takes from the user's Function, or keeps.
- `rewrite` replaces nodes by others of the same meaning.
"""
