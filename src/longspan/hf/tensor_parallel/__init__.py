"""Tensor parallelism of a Hugging Face model: which weight is sharded along which dimension, and experts."""
