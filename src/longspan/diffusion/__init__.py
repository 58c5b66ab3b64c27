"""Diffusion transformers of diffusers: tokens are sharded inside the model, inputs and output are whole.

Every rank of a sequence group passes the same inputs and gets the same output. How a model is sharded is read from one
forward of a small copy (`small.py`, `structure.py`), which is then compared with itself over the ranks (`check.py`).
Tokens are split in front of the first block and joined after the last projection (`tokens.py`), each attention sees
the tokens of all ranks, by Ulysses or in a ring (`attention.py`). A block whose batch has the frames of a video shards
these instead while it runs, by one all-to-all before and after it.
"""
