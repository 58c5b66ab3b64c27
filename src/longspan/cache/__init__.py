"""The KV cache of a sequence that lies over several ranks."""
