"""Kernel families: what can run a step, how, and why not."""
