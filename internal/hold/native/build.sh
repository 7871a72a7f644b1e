#!/bin/sh
# Builds the forker for both architectures, then dsec-hold with it inside for
# both, to where the Go packages embed them from.
set -eu
cd "$(dirname "$0")"
root=$(cd ../../.. && pwd)
flags="-std=gnu11 -Os -Wall -Wextra -Werror -static -nostdlib -ffreestanding -fno-stack-protector -fno-pie -no-pie
	-fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns -Wl,--build-id=none -Wl,-z,noexecstack -s"
build() { # arch compiler
	command -v "$2" >/dev/null || { echo "build forker for $1: $2 is not installed (apt-get install gcc${3:+ $3})" >&2; exit 1; }
	"$2" $flags -o "bin/forker-$1.new" forker.c
	mv "bin/forker-$1.new" "bin/forker-$1"
}
mkdir -p bin "$root/internal/embedded/bin"
build amd64 "${CC_AMD64:-x86_64-linux-gnu-gcc}"
build arm64 "${CC_ARM64:-aarch64-linux-gnu-gcc}" gcc-aarch64-linux-gnu
cd "$root"
for arch in amd64 arm64; do
	CGO_ENABLED=0 GOARCH=$arch go build -trimpath -ldflags "-s -w" -o "internal/embedded/bin/dsec-hold-$arch.new" ./cmd/dsec-hold
	mv "internal/embedded/bin/dsec-hold-$arch.new" "internal/embedded/bin/dsec-hold-$arch"
done
