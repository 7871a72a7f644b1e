#!/bin/sh
# Builds the forker and the server of cells, then dsec-hold with them inside, for both architectures, and the agent of guests, to
# where the Go packages embed them from. The other architecture's is left out,
# with a notice, if its compiler is not installed.
set -eu
cd "$(dirname "$0")"
root=$(cd ../../.. && pwd)
flags="-std=gnu11 -Os -Wall -Wextra -Werror -static -nostdlib -ffreestanding -fno-stack-protector -fno-pie -no-pie
	-fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns -Wl,--build-id=none -Wl,-z,noexecstack
	-Wl,-z,noseparate-code -s"
mkdir -p bin "$root/internal/embedded/bin"
host=$(cd "$root" && go env GOARCH)
for arch in amd64 arm64; do
	case $arch in
	amd64) cc=${CC_AMD64:-x86_64-linux-gnu-gcc} ;;
	arm64) cc=${CC_ARM64:-aarch64-linux-gnu-gcc} ;;
	esac
	if ! command -v "$cc" >/dev/null; then
		echo "build forker for $arch: $cc is not installed" >&2
		[ "$arch" != "$host" ] || exit 1
		continue
	fi
	# shellcheck disable=SC2086 # flags are words
	"$cc" $flags -o "bin/forker-$arch.$$" forker.c
	mv "bin/forker-$arch.$$" "bin/forker-$arch"
	# shellcheck disable=SC2086
	"$cc" $flags -o "bin/cell-$arch.$$" cell.c
	mv "bin/cell-$arch.$$" "bin/cell-$arch"
	hold=$root/internal/embedded/bin/dsec-hold-$arch
	(cd "$root" && CGO_ENABLED=0 GOARCH=$arch go build -trimpath -ldflags "-s -w" -o "$hold.$$" ./cmd/dsec-hold)
	mv "$hold.$$" "$hold"
	# Virtual machines are of this machine's architecture, and only one that QEMU is driven for.
	guest=$root/internal/embedded/bin/dsec-guest-$arch
	if [ "$arch" = "$host" ]; then
		(cd "$root" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$guest.$$" ./cmd/dsec-guest)
		mv "$guest.$$" "$guest"
	fi
done
