"""The Triton kernels, one file each. What calls them checks shapes and chooses launch parameters."""
