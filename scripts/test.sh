#!/usr/bin/env bash
# Runs the tests: all of them, or only those named (go, py, tiers, vm).
# DSEC_LONG=1 gives the full lengths. Packages that look at the whole machine, or
# make of it what others would see, run one after the other; the rest two at a time.
set -euo pipefail
what=${1:-all}
export GOFLAGS=-trimpath # as make has it, so that nothing is compiled twice
timeout=20m
[ -n "${DSEC_LONG:-}" ] && timeout=3h
alone='/(audit/(proc|watch)|e2e|layer/(ondemand|resident)|rootfs|runtime/(container|gvisor|fullvm)|cmd/dsec/daemon|internal/(apparmor|cgroup|diskpool|hold|linux))(/|$)'

run_go() {
  echo "== go test -race"
  go test -race -exec /bin/true ./... >/dev/null # builds every test binary in parallel
  # The suite of both ways to bring layers starts thousands of processes, which the
  # race detector makes five times slower; what they run is raced in its own tests.
  slow=github.com/opendsec/dsec/layer/ondemand/ondemandtest
  if [ -n "${DSEC_LONG:-}" ]; then slow=; fi
  # The longest begin, so that none is left alone with half of the machine.
  beside=$(go list ./... | grep -vE "$alone")
  { grep /runtime/microvm <<<"$beside"; grep -v /runtime/microvm <<<"$beside"; } | xargs go test -race -count=1 -p 2 -timeout "$timeout"
  go list ./... | grep -E "$alone" | grep -vx "${slow:-none}" | xargs go test -race -count=1 -p 1 -timeout "$timeout"
  if [ -n "$slow" ]; then CGO_ENABLED=0 go test -count=1 -timeout "$timeout" "$slow"; fi
  if [ -n "${DSEC_LONG:-}" ]; then
    run_tiers
    scripts/fuzz.sh 60s
    run_vm
  fi
}
# The cases of whole machines that look at a sandbox as its users do; layers come to gVisor whole, so that no read waits for one.
run_tiers() {
  cases='A25|B11|B18|C8|D13|D16|G1_|G3_|G21|I5|KilledGateway|KilledHold|KillUnderLoad|FullHost|PoliciesOut|SeesPackages|NewVersion|AFailedRollout|WrongReq|OneSandboxCannot|DirectoriesAnd|DownOnAFull'
  echo "== whole machines of microVMs"
  DSEC_LONG= DSEC_TEST_TIER=microvm go test -race -count=1 -timeout "$timeout" -run "$cases|Evicted|AnOutage|WhoMayHave|WhatLayers" ./e2e/machine
  echo "== whole machines of containers behind gVisor"
  DSEC_LONG= DSEC_TEST_ISOLATION=gvisor go test -race -count=1 -timeout "$timeout" -run "$cases" ./e2e/machine
  echo "== whole machines of full VMs" # each sandbox boots, and has the system of its image, not one of ours
  DSEC_LONG= DSEC_TEST_TIER=fullvm go test -race -count=1 -timeout "$timeout" -run 'A25|C8|D16|G1_|G21|KilledGateway|KilledHold|FullHost|WrongReq|NewVersion' ./e2e/machine
}
run_py() {
  echo "== mypy, pytest over containers, and meanwhile over the fake tier"
  (
    cd sdk/python
    python=../../.venv/bin/python
    said=$(mktemp)
    "$python" -m pytest -q >"$said" 2>&1 & # it waits more than it works
    fake=$!
    trap 'kill "$fake" 2>/dev/null || true; rm -f "$said"' EXIT
    rc=0
    "$python" -m mypy --strict src tests || rc=$?
    DSEC_TEST_SERVER="$python tests/container_server.py" "$python" -m pytest -q -p no:cacheprovider || rc=$?
    wait "$fake" || rc=$?
    cat "$said"
    exit $rc
  )
}
run_vm() {
  echo "== Linux 6.1 in a VM"
  DSEC_VM=1 go test -count=1 -timeout "$timeout" -v ./e2e/vm/
}
case $what in
  all) run_go; run_py ;;
  go) run_go ;;
  py) run_py ;;
  tiers) run_tiers ;;
  vm) run_vm ;;
  *) echo "test.sh: unknown part $what" >&2; exit 2 ;;
esac
