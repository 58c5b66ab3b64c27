"""The forward of a parallelized model: its stages, outputs, losses, KV cache and attention."""
