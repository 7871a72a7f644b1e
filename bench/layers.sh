#!/usr/bin/env bash
# What layers cost, on images of Debian and PyPI packages (some 7 GB below
# .cache/images, made once). Prints what bench/RESULTS.md has of it and draws
# bench/plots. N= sandboxes of the set-up, LIVE= of the mount options.
set -euo pipefail
cd "$(dirname "$0")/.."
bench/images/build.sh

uname -sr; nproc; uptime; date -u +%F
mkdir -p bench/plots
bin/dsec bench chunks --plots bench/plots
bin/dsec bench setup --n "${N:-32}" --plots bench/plots
bin/dsec bench cache --lives "1,${LIVE:-1000}" --plots bench/plots
