#!/bin/bash
# class: history_mining
# does: takes the file of another commit
# source: own
# repo: any
# when: mid
cd /repo; git for-each-ref; git checkout origin/fix -- . ; git reset -q
