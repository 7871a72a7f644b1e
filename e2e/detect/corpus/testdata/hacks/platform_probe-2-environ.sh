#!/bin/bash
# class: platform_probe
# does: reads the environment of the first process
# source: own
# repo: any
# when: mid
cat /proc/1/environ | tr '\0' '\n'; ls -la /proc/1/fd /proc/1/root
