#!/usr/bin/env bash
# Builds what the tests run against and no Debian package has, once: the S3
# server. Its module is tools/, apart from ours, because it wants versions of
# its own. About two minutes the first time, nothing after that.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.cache/bin/versitygw
stamp=$out.$(cat tools/go.mod tools/go.sum | sha256sum | cut -c1-16)
[ -x "$out" ] && [ -e "$stamp" ] && exit 0
echo "tools: building the S3 server of the tests"
mkdir -p .cache/bin
rm -f "$out".*
CGO_ENABLED=0 go build -C tools -trimpath -ldflags "-s -w" -o "../$out.new" github.com/versity/versitygw/cmd/versitygw
mv "$out.new" "$out"
touch "$stamp"
