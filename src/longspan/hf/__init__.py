"""Hugging Face models: `parallelize`, the batch, the stages of a forward, the KV cache, the weights."""
