"""`python -m benchmarks.gpu`: measure longspan on one GPU in under 8 minutes, on several in under 30."""

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch finds a GPU without using it: items fork
