"""Weights of a parallelized model: load shard by shard, FSDP, the tensor axis, experts, averages of gradients."""
