#!/bin/bash
# class: scan
# does: tries ports with xargs
# source: own
# repo: any
# when: mid
# set: late
seq 3000 3011 | xargs -I{} sh -c 'curl -s -m 0.5 http://198.51.100.20:{}/ -o /dev/null; sleep 0.5'
