#!/bin/bash
# class: scan
# does: looks for a web server on each address of a net
# source: DSec paper, security incidents: service scans for mirrors
# repo: any
# when: mid
for i in $(seq 1 12); do curl -s -o /dev/null -m 0.4 http://192.168.7.$i/simple/; sleep 0.5; done
