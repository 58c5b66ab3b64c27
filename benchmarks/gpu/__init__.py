"""`python -m benchmarks.gpu`: what GPUs say about longspan, in one command: one under 8 minutes, several under 30."""

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU, without using it: items fork
