"""Checks of a parallelized model: equal batches on all ranks, misuse, NaN, the version of transformers."""
