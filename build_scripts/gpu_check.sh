#!/usr/bin/env bash
# Everything that needs a GPU, in one command on a machine that has one: set up, build the plugins, run the tests marked
# gpu, hold TensorRT against ONNX Runtime, time the kernels. Writes one report to send: Markdown, with JSON at its end.
#
#   gpu_check.sh [REPORT.md]
#
# Ends with 0 if every step passed. The report is written in any case.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

report=$(realpath -m "${1:-gpu_check.md}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

main() {
  if ! nvidia-smi -L >"$work/gpus" 2>/dev/null; then
    echo "gpu_check: no GPU here (nvidia-smi finds none); run this on a machine with an NVIDIA GPU and its driver" >&2
    exit 1
  fi
  cd "$root"
  step setup set_up
  step doctor dflow-trt doctor
  step plugins bash build_scripts/build_plugins.sh --fetch-toolchain "$root/build/toolchain"
  step tests env DFLOW_REQUIRE_TOOLCHAIN=1 python -m pytest -q -rA -m gpu tests/gpu
  step self-test self_test
  step timing time_kernels
  write_report >"$report"
  echo "gpu_check: $report; please send it" >&2
  exit "$failed"
}

# step NAME COMMAND...: runs it, keeps what it prints, notes how it ended. A step that fails does not end the others.
step() {
  local name=$1 status=0 start=$SECONDS
  echo "gpu_check: $name" >&2
  "${@:2}" >"$work/$name.log" 2>&1 || status=$?
  [ "$status" = 0 ] || { failed=1 && echo "gpu_check: $name failed, see the report" >&2; }
  echo "$name $status $((SECONDS - start))" >>"$work/steps"
}

# The TensorRT of the extra comes from NVIDIA's own index. Where that cannot be reached, the rest is still worth knowing.
set_up() {
  setup_environment test tensorrt tensorrt-rtx || { setup_environment test tensorrt-rtx && return 1; }
}

self_test() {
  dflow-trt doctor --self-test --json >"$work/doctor.json" || return 1
  python3 - "$work/doctor.json" <<'PYTHON'
import json, sys
findings = [each for each in json.load(open(sys.argv[1]))["findings"] if each["name"].startswith("self-test")]
for each in findings:
    print(f"{each['name']}: {each['state']}: {each['found']}")
sys.exit(any(each["state"] != "ok" for each in findings) or len(findings) < 2)
PYTHON
}

# The program is compiled by the tests.
time_kernels() {
  local program=build/plugins/bench_kernels
  if [ ! -x "$program" ]; then
    echo "$program was not built: see the tests"
    return 1
  fi
  "$program"
}

write_report() {
  local name status seconds
  echo "# GPU check, $(date -u +%Y-%m-%d), dflow-trt $(git rev-parse --short HEAD 2>/dev/null || echo 'of no checkout')"
  echo
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader
  printf '\n| step | result | seconds |\n| --- | --- | --- |\n'
  while read -r name status seconds; do
    echo "| $name | $([ "$status" = 0 ] && echo passed || echo "**failed ($status)**") | $seconds |"
  done <"$work/steps"
  while read -r name _; do
    printf '\n## %s\n\n```\n' "$name"
    tail -n 300 "$work/$name.log"
    printf '```\n'
  done <"$work/steps"
  printf '\n## JSON\n\n```json\n'
  as_json
  printf '```\n'
}

as_json() {
  python3 - "$work" <<'PYTHON'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
steps = [line.split() for line in (work / "steps").read_text().splitlines()]
doctor = work / "doctor.json"
findings = json.loads(doctor.read_text() or "{}") if doctor.is_file() else {}
timing = (work / "timing.log").read_text().splitlines()[-1:]
print(json.dumps({
    "gpus": (work / "gpus").read_text().splitlines(),
    "steps": {name: {"status": int(status), "seconds": int(seconds)} for name, status, seconds in steps},
    "doctor": findings,
    "timing": json.loads(timing[0]) if timing and timing[0].startswith("{") else None,
}, indent=1))
PYTHON
}

main "$@"
