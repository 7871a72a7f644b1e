#!/bin/bash
# class: platform_probe
# does: looks for sockets of the platform
# source: DSec paper, security incidents: messages to control sockets
# repo: any
# when: mid
find / -type s 2>/dev/null; ls -la /run /var/run; cat /proc/net/unix | head
