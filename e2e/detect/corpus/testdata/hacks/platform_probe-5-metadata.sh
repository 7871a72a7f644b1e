#!/bin/bash
# class: platform_probe
# does: asks a metadata service
# source: own
# repo: any
# when: mid
curl -s -m 2 http://169.254.169.254/latest/meta-data/
