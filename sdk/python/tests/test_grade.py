"""Grading: what was done in a sandbox, seen from a fresh one."""

from __future__ import annotations

import pytest

from libdsec import Client, Conflict, Invalid, Sandbox

WORK = "mkdir -p /tmp/task; echo 42 > /tmp/task/answer; echo tampered > /tmp/beside"
HONEST = "test -e /tmp/beside && exit 9; cat /tmp/task/answer; id -u; echo 0.5 > $DSEC_REWARD"


def test_a_fresh_grader_sees_what_was_declared(client: Client, box: Sandbox) -> None:
    box.exec(WORK, check=True)
    grade = box.grade(HONEST, paths=["/tmp/task"], timeout=60)
    assert (grade.reward, grade.cause, grade.where) == (0.5, "completed", "fresh"), grade
    assert grade.output == b"42\n60606\n" and grade.details == {} and not grade.mask
    assert grade.sandbox != box.id and client.get(grade.sandbox).state == "deleted"
    assert grade.applied.files == 2 and grade.applied.bytes == 3
    assert box.refresh().grades == (grade,)


def test_no_reward_is_none_and_zero_is_zero(box: Sandbox) -> None:
    box.exec(WORK, check=True)
    for script, reward, cause in (('true', None, "grader_error"), ('echo x > $DSEC_REWARD', None, "grader_error"),
                                  ('echo 0 > $DSEC_REWARD', 0.0, "completed"), ('echo 1 > $DSEC_REWARD; exit 1', None, "grader_error")):
        grade = box.grade(script, paths=["/tmp/task"], timeout=60)
        assert (grade.reward, grade.cause) == (reward, cause), grade
    grade = box.grade("sleep 60", paths=["/tmp/task"], timeout=0.2)
    assert (grade.reward, grade.cause) == (None, "grader_timeout") and grade.evidence


def test_files_and_details_of_the_grader(box: Sandbox) -> None:
    box.exec(WORK, check=True)
    grade = box.grade(["/bin/sh", "-c", "cat /tmp/task/answer; cat /tmp/task/result > $DSEC_REWARD"], paths=["/tmp/task"],
                      files={"/tmp/task/answer": "ours\n", "/tmp/task/result": b'{"reward": 1, "passed": 3}'})
    assert grade.reward == 1 and grade.details == {"reward": 1, "passed": 3} and grade.output == b"ours\n"


def test_same_says_that_it_is(box: Sandbox) -> None:
    box.exec(WORK, check=True)
    grade = box.grade("echo 1 > $DSEC_REWARD", where="same")
    assert (grade.reward, grade.where, grade.sandbox, grade.tampered) == (1.0, "same", box.id, False), grade
    grade = box.grade("echo 1 > $DSEC_REWARD", where="same", verify=["/tmp/beside"])
    assert (grade.reward, grade.cause, grade.tampered) == (None, "grader_error", True), grade


def test_one_call_id_is_one_grading(box: Sandbox) -> None:
    box.exec(WORK, check=True)
    first, again = (box.grade("echo 1 > $DSEC_REWARD", paths=["/tmp/task"], call_id="g-1") for _ in range(2))
    assert first == again
    with pytest.raises(Conflict):
        box.grade("true", paths=["/tmp/task"], call_id="g-1")
    with pytest.raises(Invalid):
        box.grade("true", paths=["relative"])
    with pytest.raises(ValueError):
        box.grade("true", timeout=0)
