# streambp with all its extras on an NVIDIA GPU. The CUDA libraries come with pip's torch, the driver with the host
# (NVIDIA Container Toolkit):
#   docker build -t streambp .
#   docker run --rm --gpus all streambp env
#   docker run --rm --gpus all -v "$HOME/.cache/huggingface:/root/.cache/huggingface" -v "$PWD:/work" streambp verify MODEL
FROM python:3.12-slim AS base
# Triton compiles its launchers with a C compiler when a kernel first runs.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PIP_NO_CACHE_DIR=1

# For work on streambp itself (.devcontainer): the sources are mounted, and .ci/setup makes .venv.
FROM base AS development
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

FROM base AS streambp
COPY pyproject.toml setup.py README.md LICENSE /source/
COPY streambp /source/streambp
RUN pip install "/source[all]" && rm -rf /source
WORKDIR /work
ENTRYPOINT ["streambp"]
CMD ["--help"]
