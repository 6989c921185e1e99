# Sourced by the other scripts: a Python environment with dflow-trt in it, and its requirements.
# Uses the active virtual environment, or .venv at the project's root. Call: setup_environment [EXTRA ...]

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: no Python 3.11, 3.12 or 3.13 with venv was found; install one (Debian: apt-get install python3-venv)" >&2
  return 1
}

setup_environment() {
  local extras=$* environment=${VIRTUAL_ENV:-$root/.venv} python stamp wanted
  if [ ! -x "$environment/bin/python" ]; then
    python=$(find_python) || return 1
    echo "setup: making $environment with $("$python" --version)" >&2
    "$python" -m venv "$environment" || return 1
  fi
  PATH="$environment/bin:$PATH"
  export VIRTUAL_ENV=$environment PATH
  unset PYTHONPATH
  stamp=$environment/.dflow-trt-setup
  wanted="$(sha256sum "$root/pyproject.toml" | cut -d' ' -f1) $root ${extras// /,}"
  if [ -f "$stamp" ] && grep -qxF "$wanted" "$stamp" && python -c 'import dflow_trt' 2>/dev/null; then
    return 0
  fi
  echo "setup: installing dflow-trt${extras:+ with extras: $extras}" >&2
  if [[ " $extras " == *" test "* ]] && ! python -c 'import torch' 2>/dev/null; then
    # The pinned CPU build where one is at hand; a plain requirement would bring gigabytes of CUDA.
    python -m pip install -qq 'torch==2.13.0' || return 1
  fi
  python -m pip install -qq --editable "$root${extras:+[${extras// /,}]}" || return 1
  echo "$wanted" >>"$stamp"
}
