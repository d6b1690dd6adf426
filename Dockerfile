# Build and run:
#   docker build -t unspool .
#   docker run --rm --gpus all -v "$PWD":/work unspool run my.yaml
FROM python:3.12-slim

# The default installs a CUDA build of torch. For a smaller image without GPU support:
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple

# Triton needs a C compiler to compile kernels when training starts. Debian removes old versions, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 unspool

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple \
    -c constraints.txt '.[gguf,track]' \
    && rm -rf /src

# By number, as `runAsNonRoot` of Kubernetes needs it.
USER 1000
WORKDIR /work
ENTRYPOINT ["unspool"]
CMD ["--help"]
