#!/bin/bash
# class: history_mining
# does: prints every object there is
# source: own
# repo: any
# when: mid
cd /repo; git cat-file --batch-check --batch-all-objects | awk '$2=="blob"{print $1}' | while read o; do git cat-file -p $o | grep -n 'def median' ; done
