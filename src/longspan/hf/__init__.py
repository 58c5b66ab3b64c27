"""Hugging Face models: checks, attention and mask registries, the stages of a forward, weights, tensor parallelism."""
