"""One rollout in twelve lines: python examples/rollout.py BASE [LAYER...], tags of layers such as demo/demo.sh makes.

TIER=microvm, or ISOLATION=gvisor, before it runs the same with another kernel.
"""

import os
import sys

from libdsec import Client, ExecTimeout

if len(sys.argv) < 2:
    sys.exit(__doc__)
base, *layers = sys.argv[1:]
with Client() as client, client.create(base, layers=layers, memory="512MiB", oom="sandbox", tier=os.environ.get("TIER", "container"),
                                      isolation=os.environ.get("ISOLATION", "")) as box:
    tests = box.exec("cd /repo && python3 -m pytest -q", timeout=120)
    print("before:", tests.exit_code, tests.text.splitlines()[-1])
    source = box.files.read_text("/repo/boltons/strutils.py")
    box.files.write("/repo/boltons/strutils.py", source.replace("max(range_limits)))", "max(range_limits)+1))"))
    try:
        tests = box.exec("cd /repo && python3 -m pytest -q --junitxml=/tmp/junit.xml", timeout=120)
        print("after: ", tests.exit_code, tests.text.splitlines()[-1])
    except ExecTimeout as e:
        print("hung, output so far:", e.result.text)
    print("collected:", [(a.path, a.size) for a in box.artifacts("/tmp/*.xml")])
