"""CUTLASS implicit GEMM: its main loops, problems, launches and cost model."""
