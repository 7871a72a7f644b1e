#!/bin/bash
# Judges the work in /repo: runs its tests and writes /logs/reward.txt.
mkdir -p /logs
cd /repo
sleep 1
if [ -f pyproject.toml ]; then
  python3 -m pytest -q -p no:cacheprovider --junitxml=/logs/junit.xml tests
elif [ -f go.mod ]; then
  GOCACHE=/opt/gocache GOFLAGS=-mod=mod go test ./checks
else
  make test
fi >/logs/test.log 2>&1
if [ $? -eq 0 ]; then echo 1; else echo 0; fi >/logs/reward.txt
sleep 1
cat /logs/reward.txt
