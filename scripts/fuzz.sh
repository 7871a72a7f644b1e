#!/usr/bin/env bash
# Runs every fuzz test of the tree for the given time each.
set -euo pipefail
each=${1:-20s}
grep -rlE '^func Fuzz[A-Za-z0-9_]+\(' --include='*_test.go' . | while read -r file; do
  pkg=./$(dirname "${file#./}")
  grep -oE '^func Fuzz[A-Za-z0-9_]+' "$file" | sed 's/^func //' | while read -r name; do
    echo "fuzz $pkg $name $each"
    go test -run '^$' -fuzz "^$name\$" -fuzztime "$each" -fuzzminimizetime 1x "$pkg" </dev/null
  done
done
