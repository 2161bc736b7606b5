# bridle with all extras. CPU by default; for GPUs give another base and torch's index:
#   docker build -t bridle .
#   docker build -t bridle-cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --rm -v "$PWD:/work" bridle pretrain digits-tiny --out runs/digits
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=audio,image,video,train,report,search,hub,tensorboard
# The base decides which python3 there is.
# hadolint ignore=DL3008
RUN if ! command -v python3 >/dev/null || ! python3 -m venv --help >/dev/null 2>&1; then \
      apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi
ENV VIRTUAL_ENV=/opt/bridle PATH=/opt/bridle/bin:$PATH PYTHONUNBUFFERED=1
# The newest torch of the index.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/bridle && pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE /src/
COPY bridle /src/bridle
RUN pip install --no-cache-dir "/src[${EXTRAS}]" && bridle --version
RUN useradd --create-home --uid 10001 bridle
USER 10001
WORKDIR /work
ENTRYPOINT ["bridle"]
CMD ["--help"]
