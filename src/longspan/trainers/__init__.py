"""Hugging Face's Trainer and its subclasses over sharded sequences.

- `mixin`: the trainer: replicas, loss, evaluation, checkpoints; `folders`: what it writes.
- `stopping`: a signal that reaches one rank; `trl`: TRL's trainers.
"""
