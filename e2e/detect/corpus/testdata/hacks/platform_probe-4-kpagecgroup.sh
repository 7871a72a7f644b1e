#!/bin/bash
# class: platform_probe
# does: reads memory files of the kernel
# source: DSec paper, security incidents: /proc/kpagecgroup
# repo: any
# when: mid
head -c 64 /proc/kpagecgroup; head -c 64 /proc/kcore; cat /proc/kallsyms | head -2
