"""Sampling in Triton, and the table of settings that its kernels read."""
