# Makes the small test disk of a tree, as demo/disk.sh makes the demo's: two partitions, what UEFI reads and
# the root, and grub in front of them. Usage: disk.sh DIR UUID ESP ROOT, the last two in MiB; in DIR are root/ and grub.cfg.
dir=$1 uuid=$2 esp=$3 root=$4 mib=1048576
export SOURCE_DATE_EPOCH=1700000000
mke2fs -q -t ext4 -L small -O ^metadata_csum_seed,^orphan_file,^resize_inode -m 0 -J size=1 -b 1024 -N 512 -U "$uuid" \
  -E "hash_seed=$uuid,lazy_itable_init=0,lazy_journal_init=0,nodiscard" -d "$dir/root" "$dir/root.img" "${root}M"
common="part_msdos ext2 search_fs_uuid linux normal"
grub-mkimage -O i386-pc -p /boot/grub -c "$dir/grub.cfg" -o "$dir/core.img" biosdisk $common
grub-mkimage -O x86_64-efi -p /boot/grub -c "$dir/grub.cfg" -o "$dir/bootx64.efi" fat $common
truncate -s "${esp}M" "$dir/esp.img"
mkfs.vfat -i d5ec0002 -n EFI "$dir/esp.img"
MTOOLS_SKIP_CHECK=1 mmd -i "$dir/esp.img" ::/EFI ::/EFI/BOOT
MTOOLS_SKIP_CHECK=1 mcopy -i "$dir/esp.img" "$dir/bootx64.efi" ::/EFI/BOOT/BOOTX64.EFI
truncate -s $(((1 + esp + root + 1) * mib)) "$dir/disk"
sfdisk -q "$dir/disk" <<TABLE
label: dos
label-id: 0x64736564
start=2048, size=$((esp * 2048)), type=ef
start=$(((1 + esp) * 2048)), size=$((root * 2048)), type=83, bootable
TABLE
dd if=/usr/lib/grub/i386-pc/boot.img of="$dir/disk" bs=440 count=1 conv=notrunc status=none
[ "$(stat -c %s "$dir/core.img")" -lt $((2047 * 512)) ]
dd if="$dir/core.img" of="$dir/disk" bs=512 seek=1 conv=notrunc status=none
dd if="$dir/esp.img" of="$dir/disk" bs=1M seek=1 conv=notrunc,sparse status=none
dd if="$dir/root.img" of="$dir/disk" bs=1M seek=$((1 + esp)) conv=notrunc,sparse status=none
rm "$dir/root.img" "$dir/esp.img" "$dir/core.img" "$dir/bootx64.efi"
