#!/bin/sh
# The container's arguments are the launcher's. `exec`, so that it gets the signals of `docker stop`.
# The container toolkit mounts the driver's libraries; the linker's cache does not know them yet.
ldconfig 2>/dev/null || true
# Compiled kernels stay with the models, so that the next container starts faster. Where neither this folder nor the
# user's can be written to, they last as long as the container.
if [ -z "${TRITON_CACHE_DIR}" ]; then
    if mkdir -p "${LEGATO_CACHE:=/data/legato}/triton" 2>/dev/null && [ -w "${LEGATO_CACHE}/triton" ]; then
        export TRITON_CACHE_DIR="${LEGATO_CACHE}/triton"
    elif ! [ -w "${HOME:-/}" ]; then
        export TRITON_CACHE_DIR=/tmp/triton
    fi
fi
exec text-generation-launcher "$@"
