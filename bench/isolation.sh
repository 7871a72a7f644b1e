#!/usr/bin/env bash
# What isolation "gvisor" and the tier "microvm" cost beside a plain container, in one run. ROUNDS= and EACH=
# give its length.
set -euo pipefail
cd "$(dirname "$0")/.."
dsec=$PWD/bin/dsec
state=$(mktemp -d /var/tmp/dsec-isolation.XXXXXX)
chmod 0711 "$state"
where=(--instance isol --data "$state/data" --run "$state/run" --config "$state/dsec.yaml")
export DSEC_CONFIG=$state/context.json DSEC_SOCKET=$state/run/gateway.sock
end() {
  status=$?
  "$dsec" down "${where[@]}" --purge >>"$state/up.log" 2>&1 || { tail -n 5 "$state/up.log" >&2; exit 1; }
  rm -rf "$state"
  exit "$status"
}
demo/base.sh .cache/demo/base.tar
go run ./e2e/vm/fetch "$PWD/.cache/vm"
printf '{"gateway": {"listen": ""}, "node": {"runsc": "%s", "on_demand": "off", "kernel_cache": "%s"}}' "$(scripts/runsc.sh)" "$PWD/.cache/vm" >"$state/dsec.yaml"
"$dsec" up "${where[@]}" >"$state/up.log" 2>&1 &
up=$!
trap end EXIT
for _ in $(seq 600); do
  grep -q "dsec is up" "$state/up.log" && break
  kill -0 "$up" 2>/dev/null || { echo "isolation: dsec up ended" >&2; exit 1; }
  sleep 0.1
done
"$dsec" image import .cache/demo/base.tar --tag base
uname -sr; nproc; uptime; date -u +%F
"${PYTHON:-.venv/bin/python}" bench/isolation.py --base base --rounds "${ROUNDS:-3}" --each "${EACH:-10}"
uptime
"$dsec" doctor "${where[@]}" | grep -E 'gvisor|virtual machines'
