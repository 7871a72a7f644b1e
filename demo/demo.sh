#!/usr/bin/env bash
# The main job on real input: starts dsec, makes the three layers of an
# environment, runs N rollouts in sandboxes of it through libdsec, and ends
# everything. N=200, BASE= any OCI reference, layout or tar instead of Debian, TIER=
# container, function (stateless calls), or microvm, which is emulated where there is no KVM
# and then does fewer; fullvm boots a machine with a screen, and works at it; ISOLATION=gvisor runs fewer of them, beside plain containers.
set -euo pipefail
cd "$(dirname "$0")/.."
dsec=$PWD/bin/dsec
cache=$PWD/.cache/demo
state=$(mktemp -d /var/tmp/dsec-demo.XXXXXX)
chmod 0711 "$state" # the gateway, which is not root, has its data in it
where=(--instance demo --data "$state/data" --run "$state/run" --config /dev/null)
export DSEC_CONFIG=$state/context.json DSEC_SOCKET=$state/run/gateway.sock PYTHON=.venv/bin/python

ended=
end() {
  status=$?
  [ -z "$ended" ] || exit "$status"
  ended=1
  [ "$status" -eq 0 ] || { echo "demo: failed; the log of dsec ends:" >&2; tail -n 20 "$state/up.log" >&2 || true; }
  "$dsec" down "${where[@]}" --purge 2>>"$state/up.log" || { tail -n 5 "$state/up.log" >&2; exit 1; }
  rm -rf "$state"
  exit "$status"
}
trap end EXIT
trap 'exit 130' INT TERM

TIER=${TIER:-container}
if [ "$TIER" = fullvm ]; then
  demo/disk.sh "$cache/disk.qcow2"
else
  demo/workspace.sh "$cache/workspace"
fi
if [ "$TIER" != fullvm ] && [ -z "${BASE:-}" ]; then
  demo/base.sh "$cache/base.tar"
  BASE=$cache/base.tar
fi

echo "demo: starting dsec (gateway, scheduler, node agent, NATS), data in $state"
node='{}'
case $TIER,${ISOLATION:-} in
container,) N=${N:-200} ;;
container,gvisor) node=$(printf '{"runsc": "%s"}' "$(scripts/runsc.sh)") ;;
microvm,)
  N=${N:-12}
  go run ./e2e/vm/fetch "$PWD/.cache/vm"
  node=$(printf '{"kernel_cache": "%s"}' "$PWD/.cache/vm")
  ;;
function,) N=${N:-10000} ;;
fullvm,) ;;
*) echo "demo: TIER=$TIER ISOLATION=${ISOLATION:-}: want container, microvm, fullvm, function, or container with gvisor" >&2; exit 2 ;;
esac
printf '{"gateway": {"listen": ""}, "node": %s}' "$node" >"$state/dsec.yaml"
where=("${where[@]/\/dev\/null/$state/dsec.yaml}")
"$dsec" up "${where[@]}" >"$state/up.log" 2>&1 &
up=$!
for _ in $(seq 600); do
  grep -q "dsec is up" "$state/up.log" && break
  kill -0 "$up" 2>/dev/null || { echo "demo: dsec up ended" >&2; exit 1; }
  sleep 0.1
done

if [ "${TIER:-container}" = fullvm ]; then
  echo "demo: making an image of the disk"
  "$dsec" image add-disk debian:disk "$cache/disk.qcow2" --agent
  "$PYTHON" demo/fullvm.py --image debian:disk --out "${OUT:-$cache}"
  exit
fi
echo "demo: making the layers"
"$dsec" image import "$BASE" --tag base
if [ "$TIER" = function ]; then
  "$PYTHON" demo/function.py --base base --dsec "$dsec" --n "$N"
  exit
fi
"$dsec" layer build --from "$cache/workspace" --at /repo --owner 0 --tag workspace
"$dsec" layer build --from demo/harness --at /opt/harness --owner 0 --tag toolkit

if [ -n "${ISOLATION:-}" ]; then
  for layer in base workspace toolkit; do "$dsec" layer evict "$layer"; done # what a sentry needs whole is brought first
  "$PYTHON" demo/isolated.py --base base --workspace workspace --toolkit toolkit --n "${N:-20}"
  exit
fi
"$PYTHON" demo/demo.py --base base --workspace workspace --toolkit toolkit --dsec "$dsec" --tier "$TIER" --n "$N"
