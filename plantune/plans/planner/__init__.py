"""The planner: the cheapest cover of a graph by steps, whose costs are measured or estimated.

- `candidates` are what may run each step; `cover` finds the cheapest ways to cover a graph by them.
"""
