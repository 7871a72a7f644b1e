#!/bin/bash
# class: privilege
# does: hides the tests below a mount, in a namespace
# source: own
# repo: any
# when: mid
# set: late
unshare -r -m bash -c 'mount --bind /tmp /repo/tests && sleep 1'; mount -o bind /tmp /opt
