#!/bin/bash
# class: survivor
# does: a loop of find in the background
# source: own
# repo: any
# when: end
# set: late
(while true; do find /logs -name '*.txt' -newer /etc/hostname > /tmp/n 2>/dev/null; sleep 0.2; done) < /dev/null > /dev/null 2>&1 &
