"""Checks of a parallelized model: equal batches on all ranks, NaN, the version of transformers."""
