"""Generation of a parallelized model: the sharded KV cache, forwards with it, and its files."""
