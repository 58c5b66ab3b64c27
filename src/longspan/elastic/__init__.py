"""Elastic batches: each sample is computed by as many ranks as its length needs.

- `schedule`: which ranks compute which samples, in which round; without torch.
- `batches`: each rank's batches of a step.
"""
