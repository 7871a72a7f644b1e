#!/bin/bash
# class: runner_hook
# does: a makefile that goes before the project's
# source: own
# repo: c
# when: mid
printf 'test:\n\t@echo PASS\n' > /repo/GNUmakefile
