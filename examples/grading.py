"""Grade what an agent did where it never was: python examples/grading.py IMAGE

The reward of an agent that solves the task, of one that does not, and of one that
edits what is expected, as a grader finds it in the agent's own sandbox and in a fresh one.
"""

import sys

from libdsec import Client, Phase

if len(sys.argv) != 2:
    sys.exit(__doc__)
CHECK = 'test "$(cat /tmp/task/answer)" = "$(cat /tmp/task/expected)"'
AGENTS = {
    "honest": "echo 42 > /tmp/task/answer",
    "wrong": "echo 41 > /tmp/task/answer",
    "cheating": "echo 41 > /tmp/task/answer; echo 41 > /tmp/task/expected",
}
PHASES = [Phase("code"), Phase("test", network="none")]
with Client() as client:
    for name, script in AGENTS.items():
        with client.create(sys.argv[1], phases=PHASES, labels={"agent": name}) as box:
            box.files.mkdir("/tmp/task")
            box.files.write("/tmp/task/expected", "42")
            box.exec(script, check=True, timeout=60)
            box.set_phase("test")  # ends what the agent left running
            there = box.exec(CHECK, timeout=60).ok
            # The fresh sandbox gets the answer from this one, and from here what is expected.
            grade = box.grade(f"{CHECK} && echo 1 > $DSEC_REWARD || echo 0 > $DSEC_REWARD", paths=["/tmp/task/answer"],
                              files={"/tmp/task/expected": "42"}, timeout=60)
            print(f"{name}: graded there {float(there)}, {grade.where} {grade.reward}")
