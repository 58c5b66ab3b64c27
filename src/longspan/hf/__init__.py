"""Hugging Face models: what they must be, the registries they meet, and what stands around their forward."""
