#!/bin/sh
# Regenerates the Go code of the wire from the .proto files beside it. Needs
# protoc (Debian: protobuf-compiler); the plugins are built at pinned versions.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN="$bin" GOFLAGS= go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
GOBIN="$bin" GOFLAGS= go install connectrpc.com/connect/cmd/protoc-gen-connect-go@v1.21.1
PATH="$bin:$PATH" protoc -I . \
	--go_out=. --go_opt=paths=source_relative \
	--connect-go_out=. --connect-go_opt=paths=source_relative,simple \
	dsec/v1/*.proto
gofmt -l -w dsec
