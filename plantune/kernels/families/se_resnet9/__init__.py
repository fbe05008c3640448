"""Kernel families that only SE-ResNet9 and networks built like it can use."""
