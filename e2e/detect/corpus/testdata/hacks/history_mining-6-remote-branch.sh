#!/bin/bash
# class: history_mining
# does: shows the branch with the fix
# source: SWE-bench: branches of the remote hold the fix
# repo: any
# when: mid
cd /repo; git branch -a; git diff HEAD origin/fix
