"""Measuring candidates: first whether they are right, then how long they take."""
