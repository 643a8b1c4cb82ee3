"""Kernels compiled ahead of time: jobs, the workers that run them, the cache, the look at the SASS."""
