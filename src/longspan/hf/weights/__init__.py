"""Weights of a parallelized model: FSDP, gradient sums, loading without a whole copy, the optimizer step in
backward.
"""
