"""Where the time of a step goes: a trace of all ranks in one file, a timeline, and figures of each rank.

`record` runs code under torch's profiler, `spans` reads a trace (standard library only), `timeline` merges the events
of all ranks, writes and renders them. Importing this package does not import torch.
"""
