#!/bin/sh
# Regenerates the Go code of the wire from the .proto files beside it, with the
# plugins of the libraries it is compiled with (go.mod). Needs protoc (Debian:
# protobuf-compiler).
#
#   api/generate.sh           writes the code
#   api/generate.sh --check   fails if it is not what would be written
set -eu
cd "$(dirname "$0")"
if ! command -v protoc >/dev/null; then
	echo "api: protoc is not installed (Debian: protobuf-compiler): generated code is not made, and not checked" >&2
	[ "${1:-}" = --check ] && exit 0
	exit 1
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/bin" "$tmp/out"
CGO_ENABLED=0 go build -o "$tmp/bin/" google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
PATH="$tmp/bin:$PATH" protoc -I . \
	--go_out="$tmp/out" --go_opt=paths=source_relative \
	--connect-go_out="$tmp/out" --connect-go_opt=paths=source_relative,simple \
	dsec/v1/*.proto
gofmt -w "$tmp/out"
if [ "${1:-}" != --check ]; then
	find dsec -name '*.go' -delete
	cp -r "$tmp/out/." .
	exit 0
fi
# What is compared is the code: another protoc only writes its name differently.
cp -r dsec "$tmp/have"
find "$tmp/have" -name '*.proto' -delete
find "$tmp/have" "$tmp/out" -name '*.pb.go' -exec sed -i '/^\/\/ 	protoc  /d' {} +
if ! diff -r -u "$tmp/have" "$tmp/out/dsec" >"$tmp/diff"; then
	head -40 "$tmp/diff" >&2
	echo "api: the generated code is not that of the .proto files: run make generate" >&2
	exit 1
fi
