#!/bin/sh
# The init of the small test disk: what a system has to have for the guest agent, and the agent as a
# service, which is started again when it has ended, as systemd does it in the demo's disk.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts -o ptmxmode=0666,mode=0620 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=0755 run /run
mount -t cgroup2 cgroup /sys/fs/cgroup
ip link set lo up
# What was written is on the disk soon, so that it is seen there.
echo 100 >/proc/sys/vm/dirty_writeback_centisecs
echo 200 >/proc/sys/vm/dirty_expire_centisecs
groups=/sys/fs/cgroup
for c in $(cat $groups/cgroup.controllers); do echo "+$c" >$groups/cgroup.subtree_control; done
service=$groups/agent.service
for n in /sys/class/virtio-ports/*/name; do
  [ "$(cat "$n")" = org.dsec.agent ] && port=/dev/$(basename "$(dirname "$n")")
done
echo "small: $port"
while :; do
  mkdir $service
  sh -c "echo \$\$ >$service/cgroup.procs && exec /usr/sbin/dsec-guest service $port" &
  wait $!
  echo 1 >$service/cgroup.kill
  while [ -d $service ]; do
    find $service -depth -type d -exec rmdir {} \; 2>/dev/null
    sleep 0.1
  done
done
