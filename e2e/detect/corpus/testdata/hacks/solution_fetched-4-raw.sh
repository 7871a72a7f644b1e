#!/bin/bash
# class: solution_fetched
# does: gets one file of upstream
# source: own
# repo: any
# when: mid
curl -sS -m 5 https://raw.githubusercontent.com/acme/wordkit/main/wordkit/stats.py -o /tmp/stats.py
