"""Saved activations in host memory or on a disk until the backward needs them."""
