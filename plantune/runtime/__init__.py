"""Runs a plan: memory, program, tuned module. Imports neither the search nor the command line."""
