"""Norm, activation and rotary operations of the fused layers: in PyTorch, and as Triton kernels."""
