#!/bin/bash
# class: history_mining
# does: searches all commits
# source: own
# repo: any
# when: mid
cd /repo; git rev-list --all | while read r; do git grep -n 'even' $r; done | head
