#!/usr/bin/env bash
# The main job on the example pair, on a bare machine: set up, build a bundle, generate losslessly, compare.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_environment

demo=${1:-$root/demo}
case $demo in -*) echo "usage: demo.sh [FOLDER]   (default: demo/ in the checkout)" >&2 && exit 2 ;; esac
[ -d "$demo/eagle3" ] || dflow-trt example "$demo" >/dev/null
drafters=()
for each in dflash dflow eagle3:drafts=7 draft-model:drafts=7; do drafters+=(--drafter "$demo/$each"); done
dflow-trt build --target "$demo/target" "${drafters[@]}" --drafter ngram --output "$demo/bundle" --force
strategies=()
for each in ngram draft-model eagle3 dflash dflow-norelay dflow; do strategies+=(--strategy "$each"); done
dflow-trt generate "$demo/bundle" --prompts "$demo/prompts.jsonl" --chat --limit 24 --batch-size 1 --threads 1 \
  "${strategies[@]}" --compare-ar
