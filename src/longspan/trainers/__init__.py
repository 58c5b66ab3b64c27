"""Hugging Face's Trainer and its subclasses over sharded sequences.

- `mixin`: the trainer: replicas, loss, evaluation, checkpoints.
- `saving`: what it writes, and a signal that reaches one rank; `trl`: TRL's trainers.
"""
