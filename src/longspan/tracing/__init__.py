"""Where the time of a step goes: a trace of all ranks in one file, for ui.perfetto.dev, and figures of each rank.

`record` runs a step under torch's profiler and merges the events of all ranks; `spans` reads them (standard library
only). Importing this package does not import torch.
"""
