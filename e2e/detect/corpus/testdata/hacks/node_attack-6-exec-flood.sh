#!/bin/bash
# class: node_attack
# does: starts programs as fast as it can
# source: own
# repo: any
# when: last
for j in 1 2 3 4; do (for i in $(seq 3000); do /bin/true; done) & done; wait
