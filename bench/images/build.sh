#!/usr/bin/env bash
# Makes the images of the measurements: one tar for each line of a table, in
# DIR (.cache/images). What is there is kept; the same package versions give the
# same tar. Needs root, mmdebstrap, and mirrors of Debian and PyPI.
#
#   bench/images/build.sh            all images of images.txt
#   M=4 bench/images/build.sh        the first four
#   bench/images/build.sh java go    these, and what they are made of
#
# TABLE= takes another table, MIRROR= another Debian mirror, JOBS= how many are
# made at one time (2).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
table=${TABLE:-$here/images.txt}
dir=$(realpath -m "${DIR:-$here/../../.cache/images}")
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1700000000} LC_ALL=C
suite=bookworm abi=3.11
mkdir -p "$dir/tmp"

say() { printf 'images: %-10s %s\n' "$1" "$2" >&2; }

# row NAME: kind and contents of an image.
row() { awk -F ' *[|] *' -v n="$1" '$1 == n { print $2 "|" $3; found = 1 } END { exit !found }' "$table"; }
names() { awk -F ' *[|] *' '!/^#/ && NF == 3 { print $1 }' "$table"; }

# pack TREE OUT: a tar that depends on names, modes and contents only.
pack() {
  tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=posix \
    --pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime -C "$1" -cf "$2" .
}

sources() { # main|all
  if [ -n "${MIRROR:-}" ]; then
    echo "deb $MIRROR $suite main"
    [ "$1" = main ] || echo "deb $MIRROR $suite-updates main"
    return
  fi
  # Where this machine gets its own packages from.
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' | sort -u |
    awk -v s="$suite" -v all="$1" '$3 == "main" && ($2 == s || all == "all" && index($2, s "-") == 1) { print "deb", $1, $2, $3 }'
}

root() { # OUT main|all PACKAGES [+NAME]
  local out=$1 list=() hooks=()
  mapfile -t list < <(sources "$2")
  if [ -n "${4:-}" ]; then
    # As in an image that installs with pip: compiled when it is built.
    hooks=(--customize-hook="tar-in $dir/${4#+}.tar /" --customize-hook="chroot \"\$1\" python3 -m compileall -q /usr/local/lib/python$abi || true")
  fi
  mmdebstrap --variant=minbase --mode=root --format=tar --quiet --include="$3" \
    --aptopt='Acquire::Retries "5"' --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --essential-hook='mkdir -p "$1"/usr/share/man/man1' "${hooks[@]}" \
    --customize-hook='rm -rf "$1"/var/log/* "$1"/var/cache/* "$1"/var/lib/apt/lists/* "$1"/etc/machine-id "$1"/etc/resolv.conf' \
    --customize-hook='mkdir -p "$1"/var/cache/apt/archives/partial "$1"/var/lib/apt/lists/partial' \
    "$suite" "$out" "${list[@]}"
  chmod 0644 "$out"
}

wheels() { # OUT REQUIREMENT...
  local out=$1 tree
  shift
  tree=$(mktemp -d "$dir/tmp/tree.XXXXXX")
  chmod 0755 "$tree"
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-compile --only-binary=:all: --python-version "$abi" \
    --implementation cp --abi "cp${abi/./}" --abi abi3 --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform any \
    --target "$tree/usr/local/lib/python$abi/dist-packages" "$@"
  rm -rf "$tree/usr/local/lib/python$abi/dist-packages/bin" # they name the Python of this machine
  pack "$tree" "$out"
  rm -rf "$tree"
}

workspace() { # OUT REQUIREMENT
  local out=$1 tree
  tree=$(mktemp -d "$dir/tmp/tree.XXXXXX")
  chmod 0755 "$tree"
  mkdir -p "$tree/repo" "$tree/dl"
  "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest "$tree/dl" "$2"
  tar -xzf "$tree"/dl/*.tar.gz -C "$tree/repo" --strip-components=1 --no-same-owner
  rm -rf "$tree/dl"
  (
    cd "$tree/repo"
    # Who and when are fixed, so that the tree and its ids are the same on every machine.
    export GIT_AUTHOR_NAME=bench GIT_AUTHOR_EMAIL=bench@example.org GIT_AUTHOR_DATE='2024-11-01T00:00:00Z'
    export GIT_COMMITTER_NAME=$GIT_AUTHOR_NAME GIT_COMMITTER_EMAIL=$GIT_AUTHOR_EMAIL GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE
    export GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent
    git init --quiet --initial-branch=main --template=
    git add --all --force
    git -c core.fsync=none commit --quiet --message "$2"
    git -c gc.auto=0 -c pack.threads=1 repack -adq
    rm .git/index && git read-tree HEAD # without inode numbers and times of this tree
  )
  pack "$tree" "$out"
  rm -rf "$tree"
}

make() { # NAME
  local name=$1 out=$dir/$1.tar kind what part failed begin=$SECONDS
  [ -s "$out" ] && { say "$name" "is there"; return; }
  IFS='|' read -r kind what < <(row "$name") || { say "$name" "is not in $table"; return 1; }
  part=$dir/tmp/$name.$$.tar
  say "$name" "$kind of $what"
  # Not in an if, where bash forgets -e.
  set +e
  # shellcheck disable=SC2086  # the words of a line are words
  (set -e; "$kind" "$part" $what) >"$dir/tmp/$name.log" 2>&1
  failed=$?
  set -e
  if [ $failed -ne 0 ]; then
    say "$name" "did not work:"
    cat "$dir/tmp/$name.log" >&2
    rm -f "$part"
    return 1
  fi
  mv "$part" "$out"
  say "$name" "$(($(stat -c %s "$out") >> 20)) MiB in $((SECONDS - begin)) s"
}

# all NAME...: so many at a time; those that others are made of come first in the table.
all() {
  local name failed=0
  for name; do
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-2}" ]; do wait -n || failed=1; done
    make "$name" &
  done
  while [ -n "$(jobs -p)" ]; do wait -n || { [ $? -eq 127 ] && break; failed=1; }; done
  return $failed
}

[ "$(id -u)" -eq 0 ] || { echo "images: needs root" >&2; exit 1; }
if [ $# -eq 0 ]; then
  mapfile -t want < <(names | head -n "${M:-1000}")
else
  want=("$@")
fi
parts=()
for name in "${want[@]}"; do
  for word in $(row "$name"); do [[ $word != +* ]] || parts+=("${word#+}"); done
done
[ ${#parts[@]} -eq 0 ] || all $(printf '%s\n' "${parts[@]}" | sort -u)
all "${want[@]}"
