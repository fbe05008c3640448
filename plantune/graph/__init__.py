"""The layer graph: values, ops, extraction, differentiation, steps and partition."""
