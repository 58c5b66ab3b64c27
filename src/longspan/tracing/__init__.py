"""Where the time of a step goes: a trace of all ranks in one file, a timeline, and figures of each rank.

`record` runs code under torch's profiler, `files` merges the events of all ranks and writes them, `spans` reads such a
trace (standard library only), `timeline` renders it. Importing this package does not import torch.
"""
