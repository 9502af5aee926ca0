"""Norm, activation and rotary operations of the fused layers: the reference, for a CPU, and as Triton kernels."""
