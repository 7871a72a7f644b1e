#!/usr/bin/env bash
# Makes the demo's workspace: the released source of boltons as a git repository
# in which break.patch has broken one function. Usage: workspace.sh OUTDIR
#
# The source comes from PyPI and is checked against its hash. That the named test
# fails before and passes after the fix is checked by demo.py, in a sandbox.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:?usage: workspace.sh OUTDIR}")
[ -e "$out/.git/refs/heads/main" ] && exit 0

name=boltons version=24.1.0
sha256=4a49b7d57ee055b83a458c8682a2a6f199d263a8aa517098bda9bab813554b87
sdist=$name-$version.tar.gz
python=${PYTHON:-python3}

cache=$(dirname "$out")/download
mkdir -p "$cache"
if ! echo "$sha256  $cache/$sdist" | sha256sum --check --status 2>/dev/null; then
  echo "demo: fetching $name $version from PyPI"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest "$cache" "$name==$version"
  echo "$sha256  $cache/$sdist" | sha256sum --check --status || { echo "demo: $sdist has another hash than $sha256" >&2; exit 1; }
fi

part=$(mktemp -d "$out.XXXXXX")
trap 'rm -rf "$part"' EXIT
tar -xzf "$cache/$sdist" -C "$part" --strip-components=1 --no-same-owner
chmod 0755 "$part"
cd "$part"
git apply --whitespace=nowarn "$here/break.patch"
# One commit of everything: who and when are fixed, so that the tree and its id are the same on every machine.
export GIT_AUTHOR_NAME=demo GIT_AUTHOR_EMAIL=demo@example.org GIT_AUTHOR_DATE='2024-11-01T00:00:00Z'
export GIT_COMMITTER_NAME=$GIT_AUTHOR_NAME GIT_COMMITTER_EMAIL=$GIT_AUTHOR_EMAIL GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE
export GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent
git init --quiet --initial-branch=main --template=
git add --all
git -c core.fsync=none commit --quiet --message "boltons $version, one function broken"
git -c gc.auto=0 repack -adq
rm -rf "$out"
cd /
mv "$part" "$out"
trap - EXIT
