"""What needs no server."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import re
import subprocess
import sys
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest

import libdsec
from libdsec import AsyncSandbox, Sandbox
from libdsec import _endpoint as endpoint
from libdsec import _frames as frames
from libdsec import _transport as transport
from libdsec import _wire as w
from libdsec import errors
from libdsec._process import raise_for
from libdsec.network import NetworkRule, NetworkState
from libdsec.types import LayerDemand, LayerTrace, Output, Result, SandboxInfo, Scrub, Spec, TracedFile, Usage, parse_size

ROOT = Path(__file__).resolve().parents[3]


def test_errors_mirror_the_classes_of_dsec_one_to_one() -> None:
    source = (ROOT / "errors.go").read_text()
    names = re.findall(r'^\t(\w+)\s+Class = "(\w+)"', source, re.M)
    assert len(names) > 15
    for name, class_ in names:
        kind = errors.from_class(class_)
        assert kind.__name__ == name and kind.class_ == class_
    retryable = re.search(r"func \(c Class\) Retryable\(\) bool \{\s+return (.*)\n", source)
    assert retryable
    wanted = set(re.findall(r"c == (\w+)", retryable.group(1)))
    assert {n for n, c in names if errors.from_class(c).retryable_class} == wanted


def test_a_failure_that_is_blamed_on_the_platform_is_an_error_of_its_own() -> None:
    result = Result.from_wire("e1", {"status": "exited", "exit_code": 2, "blame": "infra_image"}, None, None)
    with pytest.raises(errors.CommandFailed) as failed:
        raise_for("sbox", result, True)
    e = pickle.loads(pickle.dumps(failed.value))
    assert type(e) is errors.CommandBlamed and not e.retryable and "exit code 2, blamed on infra_image" in str(e) and e.result.blame == "infra_image"
    raise_for("sbox", result, False)
    info = SandboxInfo.from_wire({"state": "running", "blame": {"cause": "infra_image", "evidence": ["layer x"]}})
    assert info.result is None and info.blame is not None
    assert info.blame.cause == "infra_image" and info.blame.evidence == ("layer x",)


def test_an_error_keeps_what_it_says_when_pickled() -> None:
    e = errors.FileNotFound("stat", "/x", "no such file")
    e.index = 3
    again = pickle.loads(pickle.dumps(e))
    assert type(again) is errors.FileNotFound and isinstance(again, FileNotFoundError)
    assert str(again) == "stat /x: no such file" and again.__dict__ == e.__dict__
    out = Output.of({"head": w.b64(b"a\n")}, {"total": "2"})
    result = Result("x", "timeout", 137, 9, out, Output.of(None, None), Usage(1.0, 0, 0, 0))
    timeout = pickle.loads(pickle.dumps(errors.ExecTimeout("sbox", result)))
    assert timeout.result.stdout == b"a\n" and timeout.result.stdout.text == "a\n"


def test_error_of_a_connect_answer_has_class_object_and_result() -> None:
    detail = {"class": "sandbox_gone", "op": "exec", "object": "sabc", "message": "out of memory", "retry_after": 2,
              "result": {"outcome": "agent", "cause": "oom", "evidence": ["peak 64 MiB"], "usage": {"memory_peak": "67108864"}}}
    body = json.dumps({"code": "failed_precondition", "message": "m",
                       "details": [{"type": "dsec.v1.ErrorDetail", "value": "", "debug": detail}]}).encode()
    e = transport.error_of_response(412, {}, body, "Commands/Exec")
    assert isinstance(e, errors.SandboxGone) and e.object == "sabc" and e.retry_after == 2
    assert e.result and e.result.cause == "oom" and e.result.usage.memory_peak == 64 << 20


def test_error_of_a_stranger_is_typed_by_its_status() -> None:
    e = transport.error_of_response(503, {"retry-after": "1.5"}, b"<html>busy</html>", "x")
    assert isinstance(e, errors.Unavailable) and e.retryable and e.retry_after == 1.5


def test_frames_survive_any_cutting() -> None:
    whole = frames.frame(b"{}") + frames.frame(b"x" * 70_000) + frames.frame(b"end", 2)
    for step in (1, 3, 5, 4096, len(whole)):
        cutter = frames.Cutter()
        got = [f for at in range(0, len(whole), step) for f in cutter.feed(whole[at:at + step])]
        assert got == [(0, b"{}"), (0, b"x" * 70_000), (2, b"end")] and cutter.pending == 0
    with pytest.raises(frames.FrameError):
        list(frames.Cutter().feed(b"\0\xff\xff\xff\xff"))


def test_times_are_read_with_nanoseconds_and_zones() -> None:
    assert w.time({"t": "2026-11-29T16:38:50.123456789Z"}, "t") == datetime(2026, 11, 29, 16, 38, 50, 123456, timezone.utc)
    assert w.time({"t": "2026-11-29T18:38:50+02:00"}, "t") == datetime(2026, 11, 29, 16, 38, 50, 0, timezone.utc)
    assert w.time({}, "t") is None
    assert w.time({"t": w.timestamp(datetime(2026, 1, 2, 3, 4, 5, 6, timezone.utc))}, "t") == datetime(
        2026, 1, 2, 3, 4, 5, 6, timezone.utc)


def test_output_joins_head_and_tail_and_says_what_is_missing() -> None:
    whole = Output.of({"head": w.b64(b"abc"), "tail": w.b64(b"cde"), "tail_offset": "2"}, {"total": "5"})
    assert whole == b"abcde" and not whole.truncated and whole.text == "abcde"
    cut = Output.of({"head": w.b64(b"abc"), "tail": w.b64(b"xyz"), "tail_offset": "97"}, {"total": "100", "truncated": True})
    assert cut == b"abcxyz" and cut.truncated and cut.gap == 3 and cut.missing == 94
    assert "94 bytes not kept" in cut.text


def test_sizes_and_specs() -> None:
    assert [parse_size(s) for s in (5, "5", "64KiB", "1.5 GB", "2g")] == [5, 5, 65536, 1_500_000_000, 2_000_000_000]
    for bad in ("", "x", "5 parsecs", "-1"):
        with pytest.raises(ValueError):
            parse_size(bad)
    spec = Spec("base:1", layers=["a", "b"], memory="1MiB", mounts=[("/a", "/b")], env={"K": ""}, idle=5)
    assert spec.wire() == {"image": "base:1", "layers": ["a", "b"], "limits": {"memory": 1 << 20}, "env": {"K": ""},
                           "lifetimes": {"idle": 5}, "mounts": [{"source": "/a", "target": "/b"}]}
    assert Spec.from_wire(spec.wire()).wire() == spec.wire()
    with pytest.raises(TypeError):
        Spec("base:1", layers="a").wire()


def test_endpoint_is_found_in_the_documented_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "DEFAULT_SOCKET", str(tmp_path / "gateway.sock"))
    config = tmp_path / "config.json"
    env = {"DSEC_CONFIG": str(config)}
    with pytest.raises(errors.Unavailable, match="dsec up"):
        endpoint.find(None, None, env)
    config.write_text(json.dumps({"current": "a", "contexts": {"a": {"url": "http://ctx:1", "api_key": "k"}}}))
    assert endpoint.find(None, None, env) == endpoint.Endpoint("http://ctx:1", "", "k")
    (tmp_path / "gateway.sock").touch()
    assert endpoint.find(None, None, env).socket == str(tmp_path / "gateway.sock")
    env |= {"DSEC_URL": "http://u:1/", "DSEC_API_KEY": "e"}
    assert endpoint.find(None, None, env) == endpoint.Endpoint("http://u:1", "", "e")
    env["DSEC_SOCKET"] = "/s"
    assert endpoint.find(None, None, env).socket == "/s"
    assert endpoint.find("unix:///x/y", "k", env) == endpoint.Endpoint(socket="/x/y", api_key="k")
    with pytest.raises(errors.Invalid):
        endpoint.find("ftp://x", None, env)


def test_importing_does_nothing() -> None:
    code = ("import sys, threading; before = set(threading.enumerate()); import libdsec; "
            "assert set(threading.enumerate()) == before; assert 'asyncio.events' in sys.modules; "
            "libdsec.Client('/nonexistent.sock'); assert set(threading.enumerate()) == before")
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(endpoint.Endpoint.at("http://x", "secret"))
    assert "secret" not in repr(libdsec.Client("http://x", "secret"))


def test_a_layer_on_demand_from_the_wire() -> None:
    d = LayerDemand.from_wire({"digest": "sha256:0", "tags": ["a:1"], "data_size": "40", "chunks": "4", "here": "1",
                               "touched": "-1", "served": True, "requests": "2", "fetched": "3", "plain": "5", "stalls": "6",
                               "stalled": 1.5, "failures": "7", "last_failure": "gone"})
    assert d == LayerDemand("sha256:0", ("a:1",), 40, 4, 1, -1, True, 2, 3, 5, 6, 1.5, 7, "gone")


def test_a_trace_from_the_wire() -> None:
    t = LayerTrace.from_wire({"digest": "sha256:0", "data_size": "4096", "touched": "12", "window": 1.5, "recordings": 3,
                                    "files": [{"path": "bin/sh", "size": "9", "touched": "8", "count": 2}, {}], "more": "7"})
    assert (t.data_size, t.touched, t.expected, t.window, t.recordings, t.more) == (4096, 12, 0, 1.5, 3, 7)
    assert t.files == (TracedFile("bin/sh", 9, 8, 0, 2), TracedFile("", 0, 0, 0, 0))


def test_network_rules() -> None:
    assert NetworkRule.parse("*.pypi.org,443").wire() == {"domain": "*.pypi.org", "ports": ["443"]}
    assert NetworkRule.parse("10.1.2.0/24,5432,8000-8999").wire() == {"cidr": "10.1.2.0/24", "ports": ["5432", "8000-8999"]}
    assert NetworkRule.parse("9.9.9.9,udp,53").wire() == {"cidr": "9.9.9.9", "protocol": "udp", "ports": ["53"]}
    spec = Spec("x", network="allow-list", allow=["pypi.org", NetworkRule(cidr="1.2.3.4")])
    again = Spec.from_wire(spec.wire())
    assert again.allow == (NetworkRule(domain="pypi.org"), NetworkRule(cidr="1.2.3.4"))
    with pytest.raises(TypeError):
        Spec("x", allow="pypi.org").wire()
    info = SandboxInfo.from_wire({"network": {"mode": "allow-list", "allow": [{"cidr": "1.2.3.4"}], "generation": "3"}})
    assert info.network == NetworkState("allow-list", (NetworkRule(cidr="1.2.3.4"),), 3) and SandboxInfo.from_wire({}).network is None


def test_mirror_and_cutoff() -> None:
    assert NetworkRule.parse("mirror:pypi").wire() == {"mirror": "pypi"}
    day = datetime(2025, 1, 31, tzinfo=timezone.utc)
    east = timezone(timedelta(hours=8))
    for cutoff in ("2025-01-31", date(2025, 1, 31), datetime(2025, 1, 31), "2025-01-31T08:00:00+08:00", datetime(2025, 1, 31, 8, tzinfo=east), "2025-01-31T00:00:00Z"):
        spec = Spec("x", network="mirror-only", cutoff=cutoff, mirror_deny=["pypi:requests"])
        assert spec.wire()["cutoff"] == "2025-01-31T00:00:00.000000Z"
        again = Spec.from_wire(spec.wire())
        assert again.cutoff == day and again.mirror_deny == ("pypi:requests",)
    assert Spec.from_wire(Spec("x").wire()).cutoff is None
    with pytest.raises(TypeError):
        Spec("x", mirror_deny="pypi:requests").wire()
    with pytest.raises(ValueError):
        Spec("x", cutoff="last year").wire()


def test_commit_scrubs_as_pack_diff_does() -> None:
    calls: list[tuple[str, object]] = []

    class Client:
        async def _call(self, method: str, request: w.Json, timeout: float | None = None) -> w.Json:
            calls.append((method, request.get("scrub")))
            return {"digest": "sha256:0"}

    box = AsyncSandbox(Client(), SandboxInfo.from_wire({"id": "s1"}))  # type: ignore[arg-type]
    rules = Scrub(patterns=["/data/**"])
    for scrub, wire in ((False, None), (True, Scrub.all().wire()), (rules, rules.wire())):
        digest = asyncio.run(box.commit("a:1", scrub=scrub))
        packed = asyncio.run(box.pack_diff("a:1", scrub=scrub))
        assert digest == packed.digest == "sha256:0"
        assert calls[-2] == calls[-1] == ("Sandboxes/Commit", wire)
    assert "scrub" in inspect.signature(Sandbox.commit).parameters


def test_the_readme_names_every_method_of_images_layers_and_templates() -> None:
    text = (ROOT / "sdk" / "python" / "README.md").read_text()
    for name, kind in (("images", libdsec.AsyncImages), ("layers", libdsec.AsyncLayers), ("templates", libdsec.AsyncTemplates)):
        row = re.search(rf"^\| `client\.{name}` \| (.*) \|$", text, re.M)
        assert row
        assert set(re.findall(r"`(\w+)", row.group(1))) == {m for m in vars(kind) if not m.startswith("_")}


def test_boot_goes_there_and_back() -> None:
    spec = Spec("base:1", tier="microvm", boot="cold")
    assert spec.wire()["boot"] == "cold" and Spec.from_wire(spec.wire()).boot == "cold"
    assert "boot" not in Spec("base:1").wire()


def test_isolation_goes_there_and_back() -> None:
    spec = Spec("base:1", isolation="gvisor")
    assert spec.wire()["isolation"] == "gvisor" and Spec.from_wire(spec.wire()).isolation == "gvisor"
    assert "isolation" not in Spec("base:1").wire()
    info = SandboxInfo.from_wire({"id": "s1", "spec": spec.wire(), "isolated": "gvisor"})
    assert info.isolated == "gvisor" and info.spec.isolation == "gvisor"
