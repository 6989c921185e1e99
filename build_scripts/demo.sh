#!/usr/bin/env bash
# The main job on the example pair, on a bare machine: set up, build a bundle, generate losslessly, compare.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_environment

demo=${1:-$root/demo}
case $demo in -*) echo "usage: demo.sh [FOLDER]   (default: demo/ in the checkout)" >&2 && exit 2 ;; esac
[ -d "$demo/target" ] || dflow-trt example "$demo" >/dev/null
dflow-trt build --target "$demo/target" --drafter "$demo/dflash" --drafter "$demo/dflow" --output "$demo/bundle" --force
dflow-trt generate "$demo/bundle" --prompts "$demo/prompts.jsonl" --chat --limit 24 --batch-size 1 --threads 1 \
  --strategy dflash --strategy dflow-norelay --strategy dflow --compare-ar
