"""Operators of torch that plantune defines: `scans` of sequences, and `gru_translate`."""
