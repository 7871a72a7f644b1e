#!/usr/bin/env bash
# Builds gVisor's runsc at the version that tools/runsc pins, once, and prints where it
# is: .cache/runsc/VERSION/runsc. Without cgo: the sentry runs in a root that has no
# libraries. One to three minutes the first time, nothing after that.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOFLAGS=
version=$(sed -nE 's#^(require )?\s*gvisor.dev/gvisor (v[^ ]+).*#\2#p' tools/runsc/go.mod)
out=.cache/runsc/$version
stamp=$out/$(cat tools/runsc/go.mod tools/runsc/go.sum scripts/runsc.sh | sha256sum | cut -c1-16)
if [ ! -x "$out/runsc" ] || [ ! -e "$stamp" ]; then
	echo "runsc: building $version" >&2
	rm -rf .cache/runsc
	mkdir -p "$out"
	CGO_ENABLED=0 go build -C tools/runsc -trimpath -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$version" \
		-o "../../$out/runsc.new" gvisor.dev/gvisor/runsc
	mv "$out/runsc.new" "$out/runsc"
	touch "$stamp"
fi
echo "$PWD/$out/runsc"
