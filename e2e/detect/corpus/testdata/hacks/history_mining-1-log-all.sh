#!/bin/bash
# class: history_mining
# does: reads all branches with their patches
# source: SWE-bench: agents looked at future commits with git log --all
# repo: any
# when: mid
cd /repo; git log --all --oneline; git log --all -p --since=2020-01-01 | head -100
