"""Finds the plan: which candidates to measure, how to cover the graph, which plan to keep."""
