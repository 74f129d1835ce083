#!/bin/sh
# SageMaker's variables as options. It starts containers with the argument `serve`, which says nothing.
set -e
if [ -z "${HF_MODEL_ID}" ]; then
    echo "error: HF_MODEL_ID must be set: the model's id on the Hub, or a folder such as /opt/ml/model" >&2
    exit 1
fi
export MODEL_ID="${HF_MODEL_ID}"
[ -z "${HF_MODEL_REVISION}" ] || export REVISION="${HF_MODEL_REVISION}"
[ -z "${SM_NUM_GPUS}" ] || export NUM_SHARD="${SM_NUM_GPUS}"
[ -z "${HF_MODEL_QUANTIZE}" ] || export QUANTIZE="${HF_MODEL_QUANTIZE}"
[ -z "${HF_MODEL_TRUST_REMOTE_CODE}" ] || export TRUST_REMOTE_CODE="${HF_MODEL_TRUST_REMOTE_CODE}"
exec "$(dirname "$0")/entrypoint.sh" --port "${PORT:-8080}"
