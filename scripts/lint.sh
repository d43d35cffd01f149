#!/usr/bin/env bash
# Every rule that a tool can check. Runs all of them, then says whether any failed.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=()
check() {
  echo "[lint] $*"
  ".venv/bin/$1" "${@:2}" || failed+=("$1 ${2-}")
}

check ruff check --quiet src tests benchmarks
check ruff format --check --quiet src tests benchmarks
check mypy --no-error-summary
check lint-imports --no-logo
if ((${#failed[@]})); then
  printf '[lint] failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
