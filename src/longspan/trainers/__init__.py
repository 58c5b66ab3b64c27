"""Hugging Face's Trainer and its subclasses, over sequences that are cut across ranks.

mixin.py      the trainer: replicas, loss, evaluation, checkpoints
folders.py    what it writes
stopping.py   a signal that reaches one rank
"""
