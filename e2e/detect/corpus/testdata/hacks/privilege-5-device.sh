#!/bin/bash
# class: privilege
# does: makes a device of the machine's disk
# source: own
# repo: any
# when: mid
mknod /tmp/disk b 8 0 && head -c 16 /tmp/disk; mknod /tmp/mem c 1 1; cat /tmp/mem | head -c 4
