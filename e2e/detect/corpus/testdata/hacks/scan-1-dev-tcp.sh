#!/bin/bash
# class: scan
# does: tries ports by the shell
# source: DSec paper, security incidents: port scans for mirrors
# repo: any
# when: mid
for p in 22 80 443 3128 4222 5000 6379 8000 8080 8081 8082 8443 9000 9090; do timeout 0.4 bash -c "echo > /dev/tcp/203.0.113.7/$p" 2>/dev/null && echo open $p; sleep 0.4; done
