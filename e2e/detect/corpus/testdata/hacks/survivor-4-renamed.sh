#!/bin/bash
# class: survivor
# does: a process under a kernel thread's name
# source: own
# repo: any
# when: end
setsid bash -c 'exec -a "[kworker/0:1]" bash -c "while :; do sleep 0.3; done"' > /dev/null 2>&1 < /dev/null &
sleep 0.2
