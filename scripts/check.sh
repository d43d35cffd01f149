#!/usr/bin/env bash
# Lint and the tests: scripts/check.sh quick|all [pytest arguments]. Pytest's summary is the last line printed; a lint
# failure is shown as soon as it is found, does not hide the tests' result, and fails the whole.
set -uo pipefail
cd "$(dirname "$0")/.."

kind=${1:?quick or all}
workers=${HOLDFAST_TEST_WORKERS:-4}
unset HOLDFAST_TEST_WORKERS  # Holdfast's own settings are called so too, and tests see that there are none.
case $kind in
  # Four at a time, whole files each: for a third of its time a test waits, for a process that starts or a limit that
  # runs out, and two leave one of two cores idle. In the order of tests/conftest.py, at whose end none of the four
  # waits for the others. Another count: HOLDFAST_TEST_WORKERS. The long runs measure, and so run alone.
  # Folders without a single quick test are not even read, by none of the workers. What fails runs once more: on two
  # cores that all of this shares, a test may lose a race that a second try wins. Each such is shown with its failure
  # before the summary (tests/conftest.py), for it is a fault of the test or of the product all the same.
  quick) selection=(-m "not long and not gpu" -n "$workers" --dist loadfile --no-loadscope-reorder --reruns 1
    --ignore tests/clients --ignore tests/gpu --ignore tests/long) ;;
  all) selection=() ;;
  *) echo "scripts/check.sh quick|all" >&2; exit 2 ;;
esac
shift

# Where nothing compiled may be kept, each of some hundred processes would compile every source anew.
unset PYTHONDONTWRITEBYTECODE

lint() {
  local said
  said=$(scripts/lint.sh 2>&1) || { printf '\n%s\n' "$said" >&2; return 1; }
}

lint_status=0
if [[ $kind == quick ]]; then
  lint &  # mypy computes for a minute or more on one core, and would leave the other idle.
  beside=$!
else
  lint || lint_status=1
fi
.venv/bin/python -m pytest "${selection[@]}" "$@"
tests_status=$?
[[ $kind == all ]] || wait "$beside" || lint_status=1
((lint_status == 0)) || exit "$lint_status"
exit "$tests_status"
