"""Where the time of a step goes: a trace of all ranks in one file, a timeline, and figures of each rank.

- `record`: runs code under torch's profiler.
- `merge`: makes one Chrome trace of all ranks' events.
- `spans`: reads such a trace (standard library only).
- `drawing`, `page`: render it as PNG and HTML; `files` writes all three.

Importing this package does not import torch.
"""
