"""The grader of the demo: writes 1.0 to $DSEC_REWARD if the function is right, else 0.0.

What it judges was written by an agent, so it runs as somebody else in a process of its
own, and only what it answers is compared. It also says what is at the paths it is given.
"""

import hashlib
import json
import os
import subprocess
import sys

CASES = {"5-8": [5, 6, 7, 8], "8-5": [5, 6, 7, 8], "1,3,5-8,10-11,15": [1, 3, 5, 6, 7, 8, 10, 11, 15], "7": [7], "2-2,": [2], "": []}
ANSWER = """import json, sys
sys.path.insert(0, "/repo")
from boltons.strutils import parse_int_list
json.dump([parse_int_list(c) for c in json.load(sys.stdin)], sys.stdout)"""


def digest(path: str) -> str:
    try:
        with open(path, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()
    except OSError:
        return ""


there = {path: digest(path) for path in sys.argv[1:]}
run = subprocess.run([sys.executable, "-I", "-c", ANSWER], input=json.dumps(list(CASES)), capture_output=True, text=True,
                     user=65534, group=65534, extra_groups=[], timeout=60)
try:
    right = json.loads(run.stdout) == list(CASES.values())
except ValueError:
    right = False
with open(os.environ["DSEC_REWARD"], "w") as reward:
    json.dump({"reward": float(right), "there": there, "said": run.stderr[-300:]}, reward)
