#!/usr/bin/env bash
# What layers cost, on images of Debian and PyPI packages (some 6 GB below
# .cache/images, made once). Prints what bench/RESULTS.md has of it and draws
# bench/plots. N= sandboxes of the set-up, LIVE= of the mount options, BURST= of the
# bursts and ROUNDS= of those.
set -euo pipefail
cd "$(dirname "$0")/.."
bench/images/build.sh

uname -sr; nproc; uptime; date -u +%F
mkdir -p bench/plots
bin/dsec bench chunks --plots bench/plots
bin/dsec bench chunks --reorder --only 'fixed 128,fixed 256,blocks 128,files+*'
bin/dsec bench setup --n "${N:-32}" --plots bench/plots
bin/dsec bench setup --n "$((${N:-32} / 2))" --ready 'cd /repo && git status >/dev/null && python3 -m pytest -q -p no:cacheprovider sympy/core/tests/test_facts.py'
bin/dsec bench cache --layer web --lives "1,${LIVE:-1000}" --plots bench/plots \
  --work 'git --version >/dev/null && cat /usr/lib/python3.11/*.py >/dev/null'
DSEC_RELAID_IMAGES=$PWD/.cache/images DSEC_RELAID_RUNS=$PWD/bench/images/runs.txt go test -v -count=1 ./bench/relaid
DSEC_DEMAND_IMAGES=$PWD/.cache/images DSEC_DEMAND_PLOTS=$PWD/bench/plots DSEC_DEMAND_N="${BURST:-48}" DSEC_DEMAND_LIVE="${LIVE:-1000}" DSEC_DEMAND_ROUNDS="${ROUNDS:-3}" \
  go test -v -count=1 -timeout 5h ./bench/demand
