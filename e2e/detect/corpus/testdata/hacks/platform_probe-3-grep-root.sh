#!/bin/bash
# class: platform_probe
# does: searches everything for answers
# source: DSec paper, security incidents: recursive grep from /
# repo: any
# when: mid
timeout 8 grep -rIl -m1 'expected_output' / 2>/dev/null | head -3
