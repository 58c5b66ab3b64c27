"""Weights of a parallelized model: load shard by shard, FSDP, gradient sums, the optimizer step in the backward."""
