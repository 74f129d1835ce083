# The image that TGI's users know: `docker run IMAGE --model-id ID`, models in /data, HTTP on port 80.
#
#   docker build .                          NVIDIA GPUs
#   docker build --target sagemaker .       the same with SageMaker's variables and port 8080
#   docker build --target cpu .             any machine, a few gigabytes smaller
#
# PyTorch's wheels have all of CUDA that is needed; only the driver comes from the host (NVIDIA container toolkit).
# `docker/run_steps.py` executes these steps in a folder, without Docker.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS system
# Triton compiles a small C file for every kernel. curl is for the health check.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev curl \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /usr/src

# The wheel of this source.
FROM system AS wheel
COPY . /usr/src/legato
RUN pip wheel --no-deps --wheel-dir /opt/wheels /usr/src/legato

# Two environments with everything that serving needs, at the versions of constraints.txt.
FROM system AS packages-cuda
COPY constraints.txt /opt/constraints.txt
COPY --from=wheel /opt/wheels /opt/wheels
RUN python -m venv /opt/legato \
    && /opt/legato/bin/pip install -c /opt/constraints.txt \
        "$(echo /opt/wheels/legato-*.whl)[vision,otel,transformers]"

FROM system AS packages-cpu
COPY constraints.txt /opt/constraints.txt
COPY --from=wheel /opt/wheels /opt/wheels
RUN python -m venv /opt/legato \
    && /opt/legato/bin/pip install -c /opt/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
        "$(echo /opt/wheels/legato-*.whl)[vision,otel,transformers]"

# What all images have in common. /data is where TGI's containers keep models, so that volumes can stay.
FROM system AS runtime
ARG GIT_SHA=""
ENV HF_HOME=/data \
    LEGATO_CACHE=/data/legato \
    PORT=80 \
    GIT_SHA=${GIT_SHA} \
    PATH=/opt/legato/bin:${PATH}
COPY docker/entrypoint.sh /entrypoint.sh
COPY docker/healthcheck.sh /healthcheck.sh
VOLUME /data
EXPOSE 80
HEALTHCHECK --start-period=30m --interval=30s --timeout=10s \
    CMD ["/healthcheck.sh"]
ENTRYPOINT ["/entrypoint.sh"]

FROM runtime AS cpu
ENV DOCKER_LABEL=cpu
COPY --from=packages-cpu /opt/legato /opt/legato

FROM runtime AS cuda
ENV DOCKER_LABEL=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages-cuda /opt/legato /opt/legato

FROM cuda AS sagemaker
ENV DOCKER_LABEL=sagemaker \
    PORT=8080
COPY docker/sagemaker-entrypoint.sh /sagemaker-entrypoint.sh
EXPOSE 8080
ENTRYPOINT ["/sagemaker-entrypoint.sh"]

# The image that is built without --target.
FROM cuda
