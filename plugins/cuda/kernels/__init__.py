"""Triton functions of the built-in CUDA tactics: free of any framework, pointers and numbers in."""
