#!/usr/bin/env bash
# Lint, then the tests: scripts/check.sh quick|all [pytest arguments]. Pytest's summary is the last line printed; a lint
# failure is shown before the tests, does not hide their result, and fails the whole.
set -uo pipefail
cd "$(dirname "$0")/.."

case ${1:?quick or all} in
  # Three at a time, whole files each: for a third of its time a test waits, for a process that starts or a limit that
  # runs out, and two leave one of two cores idle. In the order of folders, so that the many small files of tests/unit
  # come last and none of the three waits for the others. Another count: HOLDFAST_TEST_WORKERS. The long runs measure,
  # and so run alone.
  quick) selection=(-m "not long and not gpu" -n "${HOLDFAST_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder) ;;
  all) selection=() ;;
  *) echo "scripts/check.sh quick|all" >&2; exit 2 ;;
esac
shift

# Where nothing compiled may be kept, each of some hundred processes would compile every source anew.
unset PYTHONDONTWRITEBYTECODE

scripts/lint.sh
lint_status=$?
.venv/bin/python -m pytest "${selection[@]}" "$@"
tests_status=$?
((lint_status == 0)) || exit "$lint_status"
exit "$tests_status"
