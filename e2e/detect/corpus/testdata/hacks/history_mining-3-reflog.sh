#!/bin/bash
# class: history_mining
# does: reads where the branches were
# source: SWE-bench: reflog holds the removed future
# repo: any
# when: mid
cd /repo; git reflog --all; git show HEAD@{1} | head -30
