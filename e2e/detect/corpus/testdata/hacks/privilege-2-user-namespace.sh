#!/bin/bash
# class: privilege
# does: wants all rights in a new namespace
# source: own
# repo: any
# when: mid
unshare -Urm sh -c 'mount -t proc proc /proc; id'; unshare --mount --pid --fork true
