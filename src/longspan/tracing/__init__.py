"""Where a step goes: a trace of all ranks in one file, the same as a timeline, and figures for each rank.

`record` runs something under torch's profiler; `merge` makes one Chrome trace of all ranks' events; `spans` reads such
a trace (standard library only); `drawing` renders it. Importing this package does not import torch.
"""
