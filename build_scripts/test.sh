#!/usr/bin/env bash
# Set up and pass the tests: lint, types, unit, parity and system tests.
#
#   test.sh [--full] [--toolchain] [ARGUMENT ...]
#
# --full adds the slow ones. --toolchain, as in CI, runs what needs nvcc, TensorRT's headers and registries, or
# TensorRT-RTX, and fetches from PyPI which of them this machine lacks (some 750 MB on disk, kept in build/ and the
# environment); without it such tests run where these are at hand, and are skipped with the reason elsewhere.
# Other arguments go to pytest, e.g. test.sh tests/unit -k relay
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

full=0
extras=(test)
arguments=()
for argument in "$@"; do
  case $argument in
    --full) full=1 ;;
    --toolchain) extras+=(test-tensorrt) && export DFLOW_REQUIRE_TOOLCHAIN=1 DFLOW_REQUIRE_RTX=1 ;;
    *) arguments+=("$argument") ;;
  esac
done
marker=(-m "not slow")
[ "$full" = 1 ] && marker=()

setup_environment "${extras[@]}"
cd "$root"
if [ ${#arguments[@]} -eq 0 ]; then
  ruff format --check .
  ruff check .
  mypy
fi
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A file's tests share bundles, so a file stays with one worker.
exec python -m pytest -n auto --maxprocesses 4 --dist loadfile "${marker[@]}" "${arguments[@]}"
