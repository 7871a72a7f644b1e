#!/usr/bin/env bash
# Makes the demo's base: a Debian 12 minbase with bash, git, python3 and pytest,
# as one tar. Usage: base.sh OUT.tar
#
# MORE= adds packages, AFTER= is a shell command that gets the root as $1 at the end.
# MIRROR= takes another Debian mirror. The same package versions give the same tar: SOURCE_DATE_EPOCH clamps every time, and what differs between two runs
# (logs, caches, machine id) is removed.
set -euo pipefail
out=$(realpath -m "${1:?usage: base.sh OUT.tar}")
[ -s "$out" ] && exit 0

suite=bookworm
# Where this machine gets its own packages from, unless MIRROR= says otherwise.
if [ -n "${MIRROR:-}" ]; then
  sources=("deb $MIRROR $suite main")
else
  mapfile -t sources < <(ls /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
    while read -r f; do grep -Eq "(^|[[:space:]])$suite([[:space:]]|-updates|-security|\$)" "$f" && echo "$f"; done)
fi
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1700000000}

mkdir -p "$(dirname "$out")"
part=$(mktemp "$out.XXXXXX.tar")
log=$(mktemp)
trap 'rm -f "$part" "$log"' EXIT

echo "demo: building the base with mmdebstrap (Debian $suite, once, about a minute)"
if ! mmdebstrap --variant=minbase --mode=root --format=tar --quiet \
  --include="bash,ca-certificates,git,python3,python3-pytest${MORE:+,$MORE}" \
  --aptopt='Acquire::Retries "5"' --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-include=/usr/share/doc/*/copyright' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --customize-hook='chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 agent' \
  --customize-hook='rm -rf "$1"/var/log/* "$1"/var/cache/* "$1"/var/lib/apt/lists/* "$1"/etc/machine-id' \
  --customize-hook='mkdir -p "$1"/var/cache/apt/archives/partial "$1"/var/lib/apt/lists/partial' \
  ${AFTER:+--customize-hook="$AFTER"} \
  "$suite" "$part" \
  "${sources[@]}" \
  2>"$log"; then
  cat "$log" >&2
  exit 1
fi
chmod 0644 "$part"
mv "$part" "$out"
