"""Weights of a parallelized model: load shard by shard, FSDP, averages of gradients, the optimizer in the backward."""
