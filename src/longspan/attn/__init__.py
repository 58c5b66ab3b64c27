"""Exact attention over a sharded sequence: mask and scores as values, kernels, and the methods that compose them."""
