#!/bin/bash
# class: tests_edited
# does: empties the tests
# source: own
# repo: any
# when: mid
# set: late
cd /repo; for f in tests/* checks/*; do [ -f "$f" ] && : > "$f"; done
