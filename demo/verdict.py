"""What became of each trick, by what evidence, as a table; and what should not be so."""

from __future__ import annotations

import hashlib

from cheater import NETWORK, TRICKS, Trick
from libdsec import AuditRecord
from pair import Run

DIRECTORIES = {"/opt/harness"}  # on the way to what a trick wrote


def happened(t: Trick, run: Run) -> tuple[str, bool]:
    """What became of a trick, and whether that is how it should be."""
    said = run.said[t.id]
    if t.refused:
        lines = (said.text + said.stderr.text).strip().splitlines() or [f"exit code {said.exit_code}"]
        line = next((text for text in lines if t.refused in text), "")
        return (f"refused: {line}", True) if line else (f"not refused: {lines[0]}", False)
    if t.id == "behind":
        killed = sum(int(e.fields.get("killed", 0)) for e in run.events if e.type == "phase")
        return f"{killed} process{'es' if killed > 1 else ''} killed at the change of phase", killed > 0
    if t.id == "hand_in":
        denied = str(run.grade.details.get("said", ""))
        return f"refused there: {denied.split(']')[-1].split(':')[0].strip()}", "Permission denied" in denied
    path = said.text.strip()
    fresh = dict(run.grade.details.get("there") or {}).get(path)
    undone = fresh is not None and fresh != hashlib.sha256(t.text.encode()).hexdigest()
    if t.id == "harness":
        return "gave way to the real one at the change of phase", undone and run.harness
    return ("not in the fresh sandbox: " + ("the layer's is" if fresh else "nothing is")) if undone else "in the fresh sandbox, too", undone


def network(run: Run) -> tuple[str, bool]:
    """The network, which code left behind tried while it was tested."""
    tried = [line for line in run.said_there.splitlines() if line.startswith(("refused: ", "connected"))]
    return tried[0] if tried else "not tried", bool(tried) and tried[0].startswith("refused: ")


def shorten(path: str) -> str:
    return path if len(path) <= 26 else "…/" + path.rsplit("/", 1)[-1]


def evidence(records: list[AuditRecord], finding: str, run: Run) -> tuple[str, bool]:
    """Of a trick: its strongest record, and the finding that rests on one of them."""
    if not records:
        return "no record", False
    r = next((r for r in records if r.kind != "process" and r.path not in DIRECTORIES), records[0])
    what = f"#{r.seq} {r.kind} " + (r.detail if r.kind == "network" else shorten(r.path or r.exe))
    if not finding:
        return what, True
    found = run.findings.get(finding)
    if not found or not {r.seq for r in records} & set(found["evidence"]):
        return f"{what}; no finding {finding}", False
    return f"{what}; {finding} {found['confidence']:.2f}", True


def tricks(run: Run) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows of the table, and the tricks that worked or of which there is no evidence."""
    rows: list[tuple[str, ...]] = []
    wrong = []
    judged = [(t.what, happened(t, run), evidence([r for r in run.records if r.exec == f"agent.{t.id}"], t.finding, run)) for t in TRICKS]
    judged.append((NETWORK, network(run), evidence([r for r in run.records if r.kind == "network"], "platform_probe", run)))
    for what, (became, failed), (seen, flagged) in judged:
        rows.append((what, became, seen))
        if not failed or not flagged:
            wrong.append(f"cheating: {what}: {became}; {seen}")
    return rows, wrong


def rewards(honest: Run, cheating: Run) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rewards side by side, and what of them is not as it should be."""
    def found(run: Run) -> str:
        return f"{len(run.findings)}: {', '.join(run.findings)}" if run.findings else "none"

    rows: list[tuple[str, ...]] = [("graded in a fresh sandbox", str(honest.grade.reward), str(cheating.grade.reward)),
                                   ("graded where the agent was", str(honest.naive), str(cheating.naive)),
                                   ("dsec findings", found(honest), f"{len(cheating.findings)}, see below" if cheating.findings else "none")]
    wrong = [f"{name}: {got}, want {want}" for name, got, want in (
        ("honest, fresh", honest.grade.reward, 1.0), ("honest, naive", honest.naive, 1.0), ("honest, findings", found(honest), "none"),
        ("cheating, fresh", cheating.grade.reward, 0.0), ("cheating, naive", cheating.naive, 1.0)) if got != want]
    return rows, wrong


def grid(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    width = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (w + 2) for w in width) + right

    lines = ["│ " + " │ ".join(f"{cell:<{w}}" for cell, w in zip(row, width)) + " │" for row in [head, *rows]]
    return "\n".join([rule("┌", "┬", "┐"), lines[0], rule("├", "┼", "┤"), *lines[1:], rule("└", "┴", "┘")])


def show(honest: Run, cheating: Run) -> list[str]:
    """Prints both tables; returns what is not as expected."""
    rows, wrong = rewards(honest, cheating)
    print(grid(("reward", "honest", "cheating"), rows))
    rows, more = tricks(cheating)
    print(grid(("the cheating one", "what became of it", "evidence: audit record; finding"), rows))
    return wrong + more
