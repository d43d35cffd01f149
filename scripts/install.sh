#!/usr/bin/env bash
# Makes the environment at .venv: scripts/install.sh runtime|dev. Knows nothing of where packages come from: that is pip's own
# configuration, so a machine with a GPU gets the CUDA build of torch that its pip finds.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:?runtime or dev}
venv=.venv
stamps=$venv/.stamps
python=${PYTHON:-python3}

say() { echo "[install] $*"; }
refuse() { echo "[install] $1" >&2; echo "[install]   fix: $2" >&2; exit 1; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in "$python" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && new_enough "$candidate"; then python=$candidate; return; fi
  done
  refuse "Python 3.11 or newer is needed; $python is $("$python" --version 2>&1 || true)" \
    "install python3.11 or newer, or name one: make install PYTHON=/path/to/python3.12"
}

make_environment() {
  if [[ -x $venv/bin/python ]] && new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  find_python
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "$python has no venv module" "install it (Debian and Ubuntu: apt-get install python3-venv) and run this again"
  say "making the environment at $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
  say "bringing pip up to date"
  "$venv/bin/python" -m pip install --upgrade pip
}

report_torch() {
  local build
  build=$("$venv/bin/python" -c 'import torch; print(torch.__version__, "CUDA" if torch.version.cuda else "CPU")')
  say "torch $build build"
  if [[ $build == *CPU && -e /proc/driver/nvidia/version ]]; then
    say "this machine has an NVIDIA driver, and pip found a CPU build of torch first: Holdfast will run on the CPU"
    say "  fix: look at 'pip config list' (find-links, index-url), then rm -rf $venv and run this again"
  fi
}

case $what in
  runtime) target=. ;;
  dev) target=.[dev] ;;
  *) refuse "unknown kind of installation: $what" "scripts/install.sh runtime|dev" ;;
esac

make_environment
mkdir -p "$stamps"
rm -f "$stamps/runtime" "$stamps/dev"
say "installing Holdfast and what it needs ($what); torch is the large part: 1-10 minutes the first time"
started=$SECONDS
"$venv/bin/python" -m pip install --no-compile --editable "$target"
# pip would compile one of 13,000 files after the other. What no Python can read, as some packages bring it, stays so.
"$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages >/dev/null || true
report_torch
touch "$stamps/runtime"
if [[ $what == dev ]]; then touch "$stamps/dev"; fi
say "done in $((SECONDS - started)) s; nothing is installed again until pyproject.toml or the C sources change"
