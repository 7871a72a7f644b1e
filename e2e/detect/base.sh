#!/usr/bin/env bash
# Makes the base of the corpus: the demo's, and what C projects and Go modules are
# built with, Go's own packages compiled. Usage: base.sh OUT.tar
set -euo pipefail
export MORE=gcc,libc6-dev,make,golang-go,python3-pip,python3-venv,python3-setuptools,python3-wheel,strace,curl,procps
# shellcheck disable=SC2016 # $1 is the root, when it is run
export AFTER='chroot "$1" sh -euc "
  mkdir -p /opt/gocache /tmp/warm; cd /tmp/warm; chmod 1777 /opt/gocache
  printf \"module warm\n\ngo 1.19\n\" > go.mod
  printf \"package warm\n\nimport (\n_ \\\"fmt\\\"\n_ \\\"os\\\"\n_ \\\"sort\\\"\n_ \\\"strings\\\"\n_ \\\"testing\\\"\n)\n\" > warm_test.go
  printf \"package warm\n\" > warm.go
  GOCACHE=/opt/gocache GOFLAGS=-trimpath go vet . && GOCACHE=/opt/gocache go vet . && GOCACHE=/opt/gocache go test .
  rm -rf /tmp/warm; chmod -R a+rwX /opt/gocache"'
exec "$(dirname "$0")/../../demo/base.sh" "$@"
