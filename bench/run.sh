#!/usr/bin/env bash
# dsec beside runc and crun on the same root file system: a static busybox.
# Prints what bench/RESULTS.md is made of. LIVE= adds idle sandboxes.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,etc,proc,sys,dev,tmp,root}
cp /bin/busybox "$root/bin/"
for name in true sh echo cat dd; do ln -s busybox "$root/bin/$name"; done
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"

uname -sr; nproc; uptime; date -u +%F
bin/dsec bench create --image "$root" --concurrency 1,8,32 --live "${LIVE:-0}"
bin/dsec bench create --image "$root" --concurrency 8 --peers "" --network open
bin/dsec bench parts --image "$root" --concurrency 8
bin/dsec bench exec --image "$root" --concurrency 1
bin/dsec bench bytes --image "$root"
bin/dsec bench idle --image "$root" --live 1000
