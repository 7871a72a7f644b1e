#!/usr/bin/env bash
# Runs every fuzz test of the tree for the given time each, as many at once as there are
# processors, each with one worker. What one said comes in one piece, when it has ended.
set -euo pipefail
each=${1:-20s}

list() {
  grep -rlE '^func Fuzz[A-Za-z0-9_]+\(' --include='*_test.go' . | while read -r file; do
    grep -oE '^func Fuzz[A-Za-z0-9_]+' "$file" | sed "s|^func |./$(dirname "${file#./}") |"
  done
}

one() {
  said=$(mktemp)
  rc=0
  go test -run '^$' -fuzz "^$3\$" -fuzztime "$1" -fuzzminimizetime 1x -parallel 1 "$2" >"$said" 2>&1 </dev/null || rc=$?
  printf 'fuzz %s %s %s\n%s\n' "$2" "$3" "$1" "$(cat "$said")"
  rm -f "$said"
  return $rc
}
export -f one

list | xargs -P "$(nproc)" -L 1 bash -c 'one "$@"' fuzz "$each"
