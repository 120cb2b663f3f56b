# finetune with CUDA, for Docker and Podman; scripts/cluster/apptainer.def is the same for Apptainer. In the repository:
#
#   docker build --tag finetune .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --volume "$PWD:/work" finetune doctor
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --volume "$PWD:/work" finetune launch RECIPE
#
# hadolint 2.15 finds nothing. It has never been built: it was written where no Docker daemon runs. With Podman,
# `--device nvidia.com/gpu=all` in place of `--gpus all`.
FROM docker.io/library/python:3.12-slim-bookworm

# g++: DeepSpeed compiles its CPU optimizer at the first start; libaio: ZeRO on NVMe; ibverbs: NCCL on InfiniBand, RoCE.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libaio-dev libibverbs1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/finetune
COPY pyproject.toml constraints.txt README.md LICENSE ./
# PyPI's torch for Linux brings CUDA's libraries and NCCL with it: the base needs neither, the host only its driver.
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY finetune finetune
COPY accelerate_configs accelerate_configs
COPY recipes recipes
COPY scripts scripts
# As a wheel: recipes and configs are inside the package.
RUN pip install --no-cache-dir --constraint constraints.txt .

WORKDIR /work
ENTRYPOINT ["python", "-m", "finetune"]
