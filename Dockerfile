# titanmoe with PyTorch for CUDA, or for CPUs only:
#
#     docker build -t titanmoe .
#     docker build -t titanmoe:cpu --target cpu .
#     docker run --rm --gpus all --ipc host -v "$PWD/runs:/work/runs" titanmoe train debug
#
# CUDA comes with PyTorch's own packages, so the host needs a driver for it and nothing else. `--ipc host` because NCCL
# and data workers talk through shared memory. Linted by hadolint; not built yet.
FROM python:3.12-slim AS base
# A C compiler, which Triton and torch.compile call; its version does not matter.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/titanmoe
COPY pyproject.toml README.md LICENSE train.py ./
COPY titanmoe titanmoe
COPY train_configs train_configs
COPY scripts scripts
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

FROM base AS cpu
# Versions are those of pyproject.toml.
# hadolint ignore=DL3013
RUN pip install -c scripts/constraints_cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[data]'
WORKDIR /work
ENTRYPOINT ["titanmoe"]

FROM base AS cuda
# hadolint ignore=DL3013
RUN pip install '.[data]'
WORKDIR /work
ENTRYPOINT ["titanmoe"]
