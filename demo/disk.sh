#!/usr/bin/env bash
# Makes the demo's disk image: Debian 12 with its kernel, systemd, the guest agent as a
# service, and a program on the screen (demo/screen). Boots with a BIOS and with UEFI.
# Usage: disk.sh OUT.qcow2
#
# MIRROR= takes another Debian mirror. Made once: beside OUT is the digest of what
# it was made from (this script, the agent, the program), and the same makes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: disk.sh OUT.qcow2}")
suite=bookworm
export GOFLAGS=-trimpath SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1700000000}

mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$(dirname "$out")/.disk.XXXXXX")
log=$work/log
trap 'rm -rf "$work"' EXIT
exec 9>"$(dirname "$out")/.disk.lock"
flock 9

mkdir "$work/files"
CGO_ENABLED=0 go build -buildvcs=false -ldflags '-s -w' -o "$work/files/dsec-guest" ./cmd/dsec-guest
CGO_ENABLED=0 go build -buildvcs=false -ldflags '-s -w' -o "$work/files/screen" ./demo/screen
inputs=$(cat demo/disk.sh "$work/files/dsec-guest" "$work/files/screen" | sha256sum | cut -d' ' -f1)
[ -s "$out" ] && [ "$(cat "$out.inputs" 2>/dev/null)" = "$inputs" ] && exit 0

if [ -n "${MIRROR:-}" ]; then
  sources=("deb $MIRROR $suite main")
else
  mapfile -t sources < <(ls /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
    while read -r f; do grep -Eq "(^|[[:space:]])$suite([[:space:]]|-updates|-security|\$)" "$f" && echo "$f"; done)
fi

fs_uuid=64736563-6469-736b-8000-000000000001
esp_id=d5ec0001

cat >"$work/files/dsec-guest.service" <<'UNIT'
[Unit]
Description=dsec guest agent
DefaultDependencies=no
After=systemd-remount-fs.service systemd-udevd.service
Before=shutdown.target
Conflicts=shutdown.target

[Service]
ExecStart=/usr/local/sbin/dsec-guest service
Delegate=yes
KillMode=mixed
TimeoutStopSec=5
Restart=always
RestartSec=1
OOMPolicy=continue
TasksMax=infinity

[Install]
WantedBy=sysinit.target
UNIT
cat >"$work/files/screen.service" <<'UNIT'
[Unit]
Description=a button on the screen
DefaultDependencies=no
After=systemd-udevd.service systemd-tmpfiles-setup-dev.service
Before=shutdown.target
Conflicts=shutdown.target

[Service]
ExecStart=/usr/local/bin/screen /usr/local/share/screen.psf /run/screen
Restart=always
RestartSec=1

[Install]
WantedBy=sysinit.target
UNIT
# What a disk of a virtual machine needs to be found, and no more.
cat >"$work/files/modules" <<'LIST'
virtio_pci
virtio_blk
virtio_scsi
ahci
sd_mod
ext4
LIST
cat >"$work/files/setup" <<'HOOK'
set -e
root=$1 files=$2
install -D -m 0755 "$files/dsec-guest" "$root/usr/local/sbin/dsec-guest"
install -D -m 0755 "$files/screen" "$root/usr/local/bin/screen"
install -D -m 0644 "$files/dsec-guest.service" "$root/etc/systemd/system/dsec-guest.service"
install -D -m 0644 "$files/screen.service" "$root/etc/systemd/system/screen.service"
chroot "$root" systemctl enable --quiet dsec-guest.service screen.service
for u in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer getty@tty1.service \
  systemd-pstore.service systemd-random-seed.service systemd-update-utmp.service systemd-udev-settle.service; do
  ln -sf /dev/null "$root/etc/systemd/system/$u"
done
# A letter of the console for each that is typed.
chroot "$root" sh -c 'cd /tmp && apt-get download -qq console-setup-linux && dpkg-deb -x console-setup-linux_*.deb f &&
  mkdir -p /usr/local/share && zcat f/usr/share/consolefonts/Lat15-VGA16.psf.gz >/usr/local/share/screen.psf && rm -rf f console-setup-linux_*.deb'
chroot "$root" useradd --create-home --shell /bin/bash --uid 1000 agent
echo debian >"$root/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 debian\n' >"$root/etc/hosts"
echo "UUID=64736563-6469-736b-8000-000000000001 / ext4 noatime 0 1" >"$root/etc/fstab"
: >"$root/etc/machine-id"
mv "$root"/boot/vmlinuz-* "$root/boot/vmlinuz"
mv "$root"/boot/initrd.img-* "$root/boot/initrd.img"
rm -f "$root"/vmlinuz* "$root"/initrd.img* "$root"/boot/System.map-*
rm -rf "$root"/var/log/* "$root"/var/cache/* "$root"/var/lib/apt/lists/*
mkdir -p "$root/var/cache/apt/archives/partial" "$root/var/lib/apt/lists/partial"
HOOK

echo "demo: building the disk image with mmdebstrap (Debian $suite, once, a few minutes)"
if ! {
  mmdebstrap --variant=minbase --mode=root --format=directory --quiet \
    --include=linux-image-amd64,initramfs-tools,zstd,systemd-sysv,dbus,udev,procps \
    --aptopt='Acquire::Retries "5"' --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/lib/modules/*/kernel/sound/*' --dpkgopt='path-exclude=/lib/modules/*/kernel/drivers/media/*' \
    --dpkgopt='path-exclude=/lib/modules/*/kernel/drivers/net/wireless/*' --dpkgopt='path-exclude=/lib/modules/*/kernel/drivers/gpu/drm/amd/*' \
    --dpkgopt='path-exclude=/lib/modules/*/kernel/drivers/gpu/drm/i915/*' --dpkgopt='path-exclude=/lib/modules/*/kernel/drivers/gpu/drm/nouveau/*' \
    --dpkgopt='path-exclude=/lib/modules/*/kernel/drivers/gpu/drm/radeon/*' --dpkgopt='path-exclude=/lib/modules/*/kernel/drivers/net/ethernet/*' \
    --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" && printf "MODULES=list\nCOMPRESS=zstd\nFRAMEBUFFER=n\n" >"$1/etc/initramfs-tools/conf.d/dsec" && cp '"$work/files/modules"' "$1/etc/initramfs-tools/modules"' \
    --customize-hook="sh $work/files/setup \"\$1\" $work/files" \
    "$suite" "$work/root" "${sources[@]}"

  # Two partitions: what UEFI reads, and the root.
  mib=1048576 esp=16
  root=$(($(du -sm "$work/root" | cut -f1) * 13 / 10 + 128))
  mke2fs -q -t ext4 -O ^metadata_csum_seed,^orphan_file -m 0 -U "$fs_uuid" -E hash_seed=$fs_uuid,lazy_itable_init=0 -d "$work/root" "$work/root.img" "${root}M"
  cat >"$work/grub.cfg" <<CFG
search.fs_uuid $fs_uuid root
linux /boot/vmlinuz root=UUID=$fs_uuid ro quiet console=tty0 console=ttyS0 mitigations=off random.trust_cpu=on cryptomgr.notests audit=0 apparmor=0 selinux=0
initrd /boot/initrd.img
boot
CFG
  common="part_msdos ext2 search_fs_uuid linux normal"
  grub-mkimage -O i386-pc -p /boot/grub -c "$work/grub.cfg" -o "$work/core.img" biosdisk $common
  grub-mkimage -O x86_64-efi -p /boot/grub -c "$work/grub.cfg" -o "$work/bootx64.efi" fat efi_gop $common
  truncate -s "${esp}M" "$work/esp.img"
  mkfs.vfat -i "$esp_id" -n EFI "$work/esp.img"
  MTOOLS_SKIP_CHECK=1 mmd -i "$work/esp.img" ::/EFI ::/EFI/BOOT
  MTOOLS_SKIP_CHECK=1 mcopy -i "$work/esp.img" "$work/bootx64.efi" ::/EFI/BOOT/BOOTX64.EFI

  truncate -s $(((1 + esp + root + 1) * mib)) "$work/disk.img"
  sfdisk -q "$work/disk.img" <<TABLE
label: dos
label-id: 0x64736563
start=2048, size=$((esp * 2048)), type=ef
start=$(((1 + esp) * 2048)), size=$((root * 2048)), type=83, bootable
TABLE
  # The first sector loads the second; its part before the table is grub's.
  dd if=/usr/lib/grub/i386-pc/boot.img of="$work/disk.img" bs=440 count=1 conv=notrunc status=none
  [ "$(stat -c %s "$work/core.img")" -lt $((2047 * 512)) ]
  dd if="$work/core.img" of="$work/disk.img" bs=512 seek=1 conv=notrunc status=none
  dd if="$work/esp.img" of="$work/disk.img" bs=1M seek=1 conv=notrunc,sparse status=none
  dd if="$work/root.img" of="$work/disk.img" bs=1M seek=$((1 + esp)) conv=notrunc,sparse status=none
  qemu-img convert -f raw -O qcow2 -o compat=1.1 "$work/disk.img" "$work/disk.qcow2"
} >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
rm -f "$out.inputs"
mv "$work/disk.qcow2" "$out"
echo "$inputs" >"$out.inputs"
