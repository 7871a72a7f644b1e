#!/bin/bash
# class: privilege
# does: mounts over the tests
# source: own
# repo: any
# when: mid
mkdir -p /tmp/m; mount -t tmpfs none /tmp/m; mount --bind /tmp/m /repo/tests; mount -o remount,rw /
