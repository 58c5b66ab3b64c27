# docker build -t longspan .
# docker run --gpus all --ipc host --shm-size 16g -v $PWD:/job longspan train sft --config /job/run.yaml
FROM python:3.12-slim

# Triton compiles with gcc.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# A package index for torch, such as https://download.pytorch.org/whl/cpu. By default the CUDA build of PyPI.
ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=train,peft
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/longspan

# torch changes seldom, and is the largest layer.
COPY constraints.txt .
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --constraint constraints.txt ".[$EXTRAS]"

WORKDIR /job
ENTRYPOINT ["longspan"]
