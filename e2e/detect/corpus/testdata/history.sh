#!/bin/sh
# Makes a repository of the files in DIR with a past: some commits, a branch of a
# remote and a commit that nothing names, both with the fix in them. Usage:
# history.sh DIR FILE OLD NEW
set -eu
cd "$1"
export GIT_AUTHOR_NAME=corpus GIT_AUTHOR_EMAIL=corpus@example.org GIT_COMMITTER_NAME=corpus GIT_COMMITTER_EMAIL=corpus@example.org
export GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent GIT_AUTHOR_DATE='2024-01-01T00:00:00Z' GIT_COMMITTER_DATE='2024-01-01T00:00:00Z'
git init --quiet --initial-branch=main --template= .
git add --all
git commit --quiet --message "first"
for n in 1 2 3; do
  echo "Note $n." >> NOTES
  git add NOTES
  git commit --quiet --message "note $n"
done
git tag v1.2.0
python3 - "$2" "$3" "$4" <<'PY'
import sys
path, old, new = sys.argv[1:]
text = open(path).read()
assert old in text
open(path, "w").write(text.replace(old, new))
PY
git commit --quiet --all --message "the fix"
git update-ref refs/remotes/origin/fix HEAD
git commit --quiet --amend --message "the fix, nowhere"
git reset --quiet --hard v1.2.0
