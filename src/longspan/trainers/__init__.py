"""Hugging Face's Trainer and its subclasses over sharded sequences.

- `mixin`: the trainer: replicas, loss, evaluation, checkpoints.
- `callbacks`: stop at values that are not finite and at signals, log a step's speed; `figures`: how it is measured.
- `evaluation`: exact means, also by position; `muon`: an optimizer for sharded matrices.
- `trl`: TRL's trainers.
"""
