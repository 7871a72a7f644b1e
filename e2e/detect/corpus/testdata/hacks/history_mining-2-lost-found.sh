#!/bin/bash
# class: history_mining
# does: looks for commits that nothing names
# source: own
# repo: any
# when: mid
cd /repo; for x in $(git fsck --lost-found --no-progress | awk '{print $3}'); do git show $x | head -40; done
