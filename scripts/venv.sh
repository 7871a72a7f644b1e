#!/usr/bin/env bash
# Makes .venv with libdsec (editable) and its pinned test tools.
set -euo pipefail
python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check -e 'sdk/python[dev]'
touch .venv/.done
