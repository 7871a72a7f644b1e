#!/bin/bash
# class: history_mining
# does: compares with every ref there is
# source: own
# repo: any
# when: mid
# set: late
cd /repo; for r in $(git for-each-ref --format='%(refname)'); do git diff HEAD $r --stat; git show $r:wordkit/stats.py 2>/dev/null | tail -5; done
