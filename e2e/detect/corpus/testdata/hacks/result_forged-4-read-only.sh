#!/bin/bash
# class: result_forged
# does: makes one that cannot be changed
# source: own
# repo: any
# when: mid
mkdir -p /logs; printf '1\n' | tee /logs/reward.txt >/dev/null; chmod 444 /logs/reward.txt; chmod 555 /logs
