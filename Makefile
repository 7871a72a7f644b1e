# make demo   set everything up and watch real rollouts in real sandboxes
# make test   set everything up and run every Go and Python test (≤ 25 min)
# make help   the rest
SHELL := /bin/bash
.DEFAULT_GOAL := build
PY := .venv/bin/python
# All that compiles has the same flags, so that nothing is compiled twice.
export GOFLAGS := -trimpath

.PHONY: help build setup native runsc test test-go test-py test-long test-vm lint demo bench bench-layers generate install clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## install what the machine lacks (Debian 12, root)
	@scripts/setup.sh

native: ## build the forker, dsec-hold and embed them
	@internal/hold/native/build.sh

build: native ## build bin/dsec
	CGO_ENABLED=0 go build -ldflags "-s -w" -o bin/dsec ./cmd/dsec

.venv/.done: sdk/python/pyproject.toml scripts/venv.sh
	@scripts/venv.sh

runsc: ## build gVisor's runsc, for isolation gvisor
	@scripts/runsc.sh

test: setup build .venv/.done lint ## every test, race detector on; gVisor only if runsc was made
	@scripts/test.sh

test-go: native ## only the Go tests
	@scripts/test.sh go

test-py: build .venv/.done ## only the Python tests
	@scripts/test.sh py

test-long: setup build .venv/.done lint runsc ## every test at full length: fuzzing, soak, killing
	@DSEC_LONG=1 scripts/test.sh

test-vm: setup native ## the tests that need another kernel, in a VM with Linux 6.1
	@scripts/test.sh vm

lint: ## formatting, vet, generated code
	@test -z "$$(gofmt -l . | tee /dev/stderr)"
	@CGO_ENABLED=0 go vet ./...
	@api/generate.sh --check

demo: setup build .venv/.done ## the main job on real input (N=200 BASE=oci-ref TIER=container|microvm|fullvm|function ISOLATION=gvisor)
	@demo/demo.sh

bench: setup build ## dsec beside runc and crun, same run
	@bench/run.sh

bench-layers: setup build ## what layers cost, on images of Debian and PyPI packages
	@bench/layers.sh

generate: ## regenerate api/ from the protobuf files
	@api/generate.sh

install: build ## install the binary and the systemd unit
	install -m 0755 bin/dsec /usr/local/bin/dsec
	install -m 0644 deploy/dsec.service /etc/systemd/system/dsec.service

clean: ## remove what the targets above made in this tree
	rm -rf bin .venv .cache
