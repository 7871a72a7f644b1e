#!/bin/busybox sh
# The first program of the small test disk: finds the root and goes there.
export PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t devtmpfs dev /dev
while read -r module; do busybox insmod "/$module"; done </modules.order
until root=$(busybox findfs LABEL=small) && busybox mount -t ext4 -o noatime "$root" /mnt; do busybox usleep 20000; done
busybox umount /proc
exec busybox switch_root /mnt /sbin/init
