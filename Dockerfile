# mjax for NVIDIA GPUs, from wheels alone: no compiler, CUDA's libraries from pip. The host needs a
# driver of CUDA 13 (580 or newer) and NVIDIA's container toolkit.
#   docker build -t mjax . && docker run --rm --gpus all --ipc host mjax doctor
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/venv

# What mjax depends on, in the tested versions: a layer that changes of mjax leave as it is.
WORKDIR /opt/mjax
COPY requirements/cuda13.txt requirements/cuda13.txt
RUN pip install --only-binary :all: -c requirements/cuda13.txt \
    'jax[cuda13]' jax-triton flax optax orbax-checkpoint grain pyarrow sentencepiece tiktoken

# The package, with the pages that `mjax docs` shows.
COPY pyproject.toml mkdocs.yml README.md LICENSE CHANGELOG.md CONTRIBUTING.md ./
COPY tools/site_pages.py tools/site_pages.py
COPY benchmarks/README.md benchmarks/README.md
COPY benchmarks/measurements.jsonl benchmarks/measurements.jsonl
COPY docs docs
COPY cookbook cookbook
COPY configs configs
COPY mjax mjax
RUN pip install --only-binary :all: -c requirements/cuda13.txt '.[cuda13,data,hub,report,serve,tensorboard]'
RUN mjax --version

WORKDIR /workspace
ENTRYPOINT ["mjax"]
