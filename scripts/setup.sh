#!/usr/bin/env bash
# Installs the Debian packages dsec needs to build, test and demonstrate itself, and
# builds the S3 server of its tests. Asks dpkg first, so that it costs nothing and
# needs no network when all is there.
set -euo pipefail

packages=(
  protobuf-compiler libprotobuf-dev   # check the generated code of the wire
  gcc libc6-dev                       # the forker, the race detector
  gcc-aarch64-linux-gnu libc6-dev-arm64-cross # the forker for the other machine
  python3 python3-venv                # libdsec, the demo
  erofs-utils                         # judges of the layers we write
  btrfs-progs e2fsprogs               # the pool that limits disks
  nftables iproute2 iputils-ping      # open networks and their tests
  mmdebstrap zstd xz-utils cpio       # the demo's base, layers in tests
  git busybox-static attr acl libcap2-bin strace # what tests run inside sandboxes
  runc crun                           # peers in the benchmark
  qemu-system-x86                     # the tests on Linux 6.1, virtual machines
  qemu-system-data seabios ovmf       # their firmware: qboot.rom, BIOS, UEFI
  qemu-utils                          # the judge of disk images
  grub-common grub-pc-bin grub-efi-amd64-bin mtools dosfstools fdisk # the demo's disk image
  gdb-minimal apparmor                # a debugger inside; the judge of the AppArmor profiles
)

missing=()
for p in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "setup: these packages are missing and only root can install them: ${missing[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
want=$(sed -n 's/^go //p' go.mod)
if ! command -v go >/dev/null; then
  echo "setup: Go ${want} or newer is not on PATH; Debian 12's own is too old, see https://go.dev/dl/" >&2
  exit 1
fi
"$(dirname "$0")/tools.sh"
