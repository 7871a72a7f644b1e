#!/bin/bash
# class: solution_fetched
# does: adds upstream and fetches it
# source: own
# repo: any
# when: mid
# set: late
cd /repo; git remote add upstream https://github.com/acme/intset.git; timeout 8 git fetch upstream
