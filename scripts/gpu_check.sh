#!/bin/sh
# The kernels on a CUDA GPU in a few minutes: their correctness, then the bench, whose table comes last.
#
#     sh scripts/gpu_check.sh [ROWS.csv]
#
# A red test ends it, so that no time is shown beside a wrong result. PYTHON names another interpreter than .venv's.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c 'import sys, torch
torch.cuda.is_available() or sys.exit("there is no CUDA GPU here, or this torch was built without CUDA")'
unset TRITON_INTERPRET
export FLOWRL_TEST_DEVICE=cuda CUBLAS_WORKSPACE_CONFIG=:4096:8
"$python" -m pytest -q -n 0 tests/kernels/test_shared_context.py tests/kernels/test_sde_step.py tests/kernels/test_ahead.py
"$python" -m flowrl bench attention --device cuda --dtype bfloat16 --csv "${1:-gpu_check.csv}"
