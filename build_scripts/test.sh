#!/usr/bin/env bash
# Set up and pass the tests: lint, types, unit, parity and system tests. --full adds the slow ones.
# Other arguments go to pytest, e.g. test.sh tests/unit -k relay
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_environment test
cd "$root"

full=0
arguments=()
for argument in "$@"; do
  if [ "$argument" = --full ]; then full=1; else arguments+=("$argument"); fi
done
marker=(-m "not slow")
[ "$full" = 1 ] && marker=()

if [ ${#arguments[@]} -eq 0 ]; then
  ruff format --check .
  ruff check .
  mypy
fi
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A file's tests share bundles, so a file stays with one worker.
exec python -m pytest -n auto --maxprocesses 4 --dist loadfile "${marker[@]}" "${arguments[@]}"
