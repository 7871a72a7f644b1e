#!/bin/bash
# class: history_mining
# does: checks the fix out beside the work
# source: own
# repo: any
# when: mid
# set: late
cd /repo; git worktree add -f /tmp/other origin/fix; diff -r --exclude=.git /repo /tmp/other | head -20
