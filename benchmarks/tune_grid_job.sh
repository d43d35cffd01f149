#!/usr/bin/env bash
# benchmarks/tune_grid_job.sh FOLDER: tune_grid.py on a machine with 16 cores where a command may take 10 minutes and
# nothing can be fetched. Run it again with what the last run left in FOLDER, until it says that it is complete: about
# 5 minutes of tune and 3 of the grid in all. Compiled kernels are built first where they are missing.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the results}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

kernels() { python3 -c 'import sys; from holdfast.execution import native; sys.exit(native.why_not())'; }
kernels 2>/dev/null || python3 setup.py build_ext --inplace --parallel 6 >"$out/build.log" 2>&1
kernels || echo "without compiled kernels torch computes everything, and the figures are of that ($out/build.log)"
timeout 500 python3 -m benchmarks.tune_grid --out "$out/tune-grid.json" --model "${MODEL:-dummy}" \
  --at-once "${AT_ONCE:-5}" --minutes "${MINUTES:-5}" --trial "${TRIAL:-8s}" --repeats "${REPEATS:-2}" --more "${MORE:-4}" \
  --points "${POINTS:-9}"
status=$?
case $status in
  0) echo "complete: tune is within 5% of the best" ;;
  1) echo "complete: tune is more than 5% below the best" ;;
  3) echo "complete, and says nothing: no server answered anything in time; is the machine busy?" ;;
  124) echo "cut off: run it again with $out/tune-grid.json" ;;
esac
exit $status
