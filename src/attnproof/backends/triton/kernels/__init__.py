"""The Triton kernels, and ``pieces``, the functions that they are made of."""
