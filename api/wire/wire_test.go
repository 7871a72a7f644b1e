package wire

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

func TestEveryClassHasACodeAndComesBack(t *testing.T) {
	for _, c := range dsec.Classes {
		if _, ok := codes[c]; !ok {
			t.Errorf("class %s has no code", c)
		}
		err := dsec.Errorf(c, "do", "thing", "because %d", 7)
		ce, ok := ConnectError(err).(*connect.Error)
		if !ok || ce.Code() != codes[c] {
			t.Fatalf("%s: %v", c, ce)
		}
		back := FromConnect("op", ce)
		if dsec.ClassOf(back) != c || back.Error() != err.Error() {
			t.Errorf("%v came back as %v (%s)", err, back, dsec.ClassOf(back))
		}
		w := httptest.NewRecorder()
		WriteError(w, err)
		raw := HTTPError("op", w.Code, w.Body.Bytes())
		if dsec.ClassOf(raw) != c || raw.Error() != err.Error() {
			t.Errorf("%v came back over raw HTTP as %v", err, raw)
		}
	}
	if len(codes) != len(dsec.Classes) {
		t.Errorf("%d codes for %d classes", len(codes), len(dsec.Classes))
	}
}

func TestErrorsKeepResultAndHint(t *testing.T) {
	res := dsec.NewResult(dsec.CauseOOM, "run", dsec.InducedBySelf, "memory.max 64 MiB")
	err := WithResult(dsec.E(dsec.SandboxGone, "exec", "s1", nil), res)
	back := FromConnect("op", ConnectError(err))
	if !reflect.DeepEqual(ResultOf(back), res) || back.Error() != "exec s1" && !strings.HasPrefix(back.Error(), "exec s1") {
		t.Fatalf("%v: %+v", back, ResultOf(back))
	}
	if WithResult(back, nil) != back {
		t.Fatal("nil changed the error")
	}
}

func TestErrorsWithoutDetailHaveAClass(t *testing.T) {
	for err, want := range map[error]dsec.Class{
		connect.NewError(connect.CodeInvalidArgument, errors.New("bad json")): dsec.Invalid,
		connect.NewError(connect.CodeUnavailable, io.ErrUnexpectedEOF):        dsec.Unavailable,
		context.DeadlineExceeded: dsec.Timeout,
		io.ErrUnexpectedEOF:      dsec.Unavailable,
	} {
		if got := dsec.ClassOf(FromConnect("op", err)); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
	if got := dsec.ClassOf(HTTPError("op", 502, []byte("<html>"))); got != dsec.Unavailable {
		t.Error(got)
	}
}

func TestSpecComesBack(t *testing.T) {
	s := dsec.Spec{Name: "n", Tier: dsec.TierContainer, Image: "i:1", Layers: []dsec.LayerRef{"w", "t"}, Command: []string{"a"},
		Env: map[string]string{"K": "V"}, User: "u", Workdir: "/w", Hostname: "h", Network: dsec.NetworkOpen,
		Limits:    dsec.Limits{CPU: 1.5, CPUWeight: 7, Memory: 1 << 40, Pids: 9, Disk: 8, Output: 3},
		Lifetimes: dsec.Lifetimes{Idle: 1500 * time.Millisecond, Lifetime: time.Hour, Retention: 3}, Profile: "debug", NoNewPrivs: true,
		OOM: dsec.OOMSandbox, Mounts: []dsec.HostMount{{Source: "/a", Target: "/b"}}, Labels: map[string]string{"l": "m"},
		CallID: "c", RolloutKey: "r", Phases: []dsec.Phase{{Name: "a"}, {Name: "b", Users: []string{"u"}, User: "u", DropCapabilities: []string{"all"},
			Network: &dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{Domain: "d"}}}, NoNewPrivs: true, Writable: []string{"/w"},
			Executables: []string{"/e"}, Hide: []string{"/h"}, Reveal: []string{"/r"}, ReadOnly: []string{"/o"}, EndServices: true,
			Limits: dsec.PhaseLimits{CPU: 0.5, Memory: 4, Pids: 5}, Back: []string{"a"}}},
		Allow:  []dsec.NetworkRule{{Mirror: "pypi"}, {CIDR: "1.2.3.4", Protocol: "udp", Ports: []string{"53"}}},
		Cutoff: time.Date(2025, 1, 31, 12, 0, 0, 5, time.UTC), MirrorDeny: []string{"pypi:requests"}}
	if got := SpecFrom(Spec(s)); !reflect.DeepEqual(got, s) {
		t.Fatalf("%+v\n%+v", got, s)
	}
}

func TestAPhaseComesBack(t *testing.T) {
	p := &dsec.PhaseState{Name: "a", Generation: 2, Since: time.Unix(3, 4).UTC(), Moving: "b"}
	if got := PhaseFrom(Phase(p)); !reflect.DeepEqual(got, p) || PhaseFrom(Phase(nil)) != nil {
		t.Fatalf("%+v", got)
	}
}

func TestBadDurationsAreRefusedByValidation(t *testing.T) {
	for _, f := range []float64{-1, math.NaN(), math.Inf(1), 1e300} {
		s := SpecFrom(&dsecv1.Spec{Image: "i", Lifetimes: &dsecv1.Lifetimes{Idle: f}})
		if err := s.Validate(); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%g became %v: %v", f, s.Lifetimes.Idle, err)
		}
	}
}

func TestFramesCarryDataLifeAndEnd(t *testing.T) {
	var b bytes.Buffer
	w := NewFrameWriter(&b)
	in := bytes.Repeat([]byte("0123456789"), 20_000)
	_, _ = w.Write(in)
	_ = w.Alive()
	_ = w.End(nil)
	got, err := io.ReadAll(NewFrameReader("read", &b))
	if err != nil || !bytes.Equal(got, in) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
}

func TestFramesEndWithTheErrorOfTheSender(t *testing.T) {
	var b bytes.Buffer
	w := NewFrameWriter(&b)
	_, _ = w.Write([]byte("partial"))
	_ = w.End(dsec.E(dsec.NoSpace, "read file", "/x", nil))
	got, err := io.ReadAll(NewFrameReader("read", &b))
	if string(got) != "partial" || dsec.ClassOf(err) != dsec.NoSpace {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestA20_FramesThatBreakOffAreAnError(t *testing.T) {
	var b bytes.Buffer
	w := NewFrameWriter(&b)
	_, _ = w.Write([]byte("some bytes"))
	_ = w.End(nil)
	whole := b.Bytes()
	for n := range len(whole) {
		if _, err := io.ReadAll(NewFrameReader("read", bytes.NewReader(whole[:n]))); dsec.ClassOf(err) != dsec.Unavailable {
			t.Fatalf("cut at %d of %d: %v", n, len(whole), err)
		}
	}
}

// The golden file is what docs/formats/api.md shows: it may grow, not change.
func TestFramesAreAsSpecified(t *testing.T) {
	var b bytes.Buffer
	w := NewFrameWriter(&b)
	_, _ = w.Write([]byte("hello"))
	_ = w.Alive()
	_ = w.End(dsec.E(dsec.FileNotFound, "read file", "/x", nil))
	got := fmt.Sprintf("%q\n", b.String())
	want, err := os.ReadFile("testdata/frames.golden")
	if err != nil || got != string(want) {
		t.Fatalf("frames changed (%v):\n%s\n%s", err, got, want)
	}
}

func FuzzFrameReader(f *testing.F) {
	var b bytes.Buffer
	w := NewFrameWriter(&b)
	_, _ = w.Write([]byte("hello"))
	_ = w.End(dsec.E(dsec.Internal, "x", "", nil))
	f.Add(b.Bytes())
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{2, 0, 0, 0, 2, '{', '}'})
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := io.ReadAll(NewFrameReader("read", bytes.NewReader(in)))
		if len(got) > len(in) {
			t.Fatalf("%d bytes out of %d", len(got), len(in))
		}
		if err == nil && !bytes.Contains(in, []byte{frameEnd}) {
			t.Fatal("a good end without an end frame")
		}
		_, _ = NewFrameReader("read", bytes.NewReader(in)).Message(&dsecv1.Frame{})
	})
}

func TestJSONCodecWritesProtoNames(t *testing.T) {
	b, err := JSON{}.Marshal(&dsecv1.CreateManyRequest{CallId: "c"})
	if err != nil || !json.Valid(b) || !bytes.Contains(b, []byte(`"call_id"`)) {
		t.Fatalf("%s, %v", b, err)
	}
	var m dsecv1.CreateManyRequest
	for _, in := range []string{`{"call_id":"x"}`, `{"callId":"x","unknown":1}`} {
		if err := (JSON{}).Unmarshal([]byte(in), &m); err != nil || m.CallId != "x" {
			t.Errorf("%s: %v, %v", in, m.CallId, err)
		}
	}
}
