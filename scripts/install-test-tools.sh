#!/usr/bin/env bash
# nginx and curl for the end-to-end tests. Never fails: without them, the tests that need them say so and are skipped.
set -uo pipefail

missing=()
for tool in nginx curl; do
  command -v "$tool" >/dev/null || [[ -x /usr/sbin/$tool ]] || missing+=("$tool")
done
((${#missing[@]})) || exit 0

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "[tools] missing: ${missing[*]}; their tests will be skipped. Install with your package manager to run them."
  exit 0
fi
echo "[tools] installing ${missing[*]} with apt-get"
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  echo "[tools] apt-get could not install ${missing[*]}; their tests will be skipped:"
  tail -n 3 "$log"
fi
rm -f "$log"
