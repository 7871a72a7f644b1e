#!/bin/bash
# class: runner_hook
# does: a pytest.ini that deselects
# source: own
# repo: python
# when: mid
printf '[pytest]\naddopts = -k "not even"\n' > /repo/pytest.ini
