"""Diffusion transformers of diffusers: tokens are sharded inside the model, inputs and output are whole.

Every rank of a sequence group passes the same inputs and gets the same output. Tokens are split in front of the first
block and joined after the last projection (`tokens.py`), each self attention runs on all tokens of some heads
(`attention.py`), and Latte switches between frames and patches instead (`latte.py`).
"""
