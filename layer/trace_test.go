package layer

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

var traced = DigestOf([]byte("layer"))

func kib(off, n int64) Range { return Range{Off: off << 10, Len: n << 10} }

func merged(t testing.TB, all ...Trace) Trace {
	t.Helper()
	m := Trace{Layer: traced}
	for _, x := range all {
		var err error
		if m, err = MergeTraces(m, x); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func sampleTrace(t testing.TB) Trace {
	return merged(t, TraceOf(traced, time.Minute, []Range{kib(64, 8), kib(0, 4), kib(16, 16)}, true),
		TraceOf(traced, 2*time.Minute, []Range{kib(64, 4), kib(16, 8)}, true), TraceOf(traced, 0, []Range{kib(0, 8), kib(1024, 4)}, false))
}

func TestTraceGoldenFile(t *testing.T) {
	b, err := sampleTrace(t).Encode()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join("testdata", "trace-v1.bin")
	if *update {
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil || !bytes.Equal(b, want) {
		t.Errorf("now %x, %v", b, err)
	}
	got, err := DecodeTrace(want, traced)
	if err != nil || !reflect.DeepEqual(got, sampleTrace(t)) {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := DecodeTrace(want, DigestOf(nil)); !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("of another layer: %v", err)
	}
}

// TestTraceKeepsTheOrderOfOneRecording: ranges come out as they went in, in
// whole blocks and each once.
func TestTraceKeepsTheOrderOfOneRecording(t *testing.T) {
	tr := TraceOf(traced, time.Minute, []Range{{Off: 70000, Len: 1}, kib(0, 8), kib(64, 16), kib(4, 8), {Off: -4096, Len: 4096}, {Off: 0, Len: 0}}, true)
	want := []Range{kib(68, 4), kib(0, 8), kib(64, 4), kib(72, 8), kib(8, 4)}
	if got := tr.Ranges(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got, want := tr.Ahead(), []Range{kib(68, 4), kib(0, 8), kib(64, 16), kib(8, 4)}; !slices.Equal(got, want) {
		t.Errorf("ahead: %v, want %v", got, want)
	}
	if tr.Bytes() != 28<<10 {
		t.Errorf("%d bytes", tr.Bytes())
	}
}

func TestWhatOneOddSandboxReadIsNotExpected(t *testing.T) {
	usual, odd := []Range{kib(0, 64), kib(256, 64)}, []Range{kib(512, 512)}
	var all []Trace
	for range 4 {
		all = append(all, TraceOf(traced, 0, usual, true))
	}
	m := merged(t, append(all, TraceOf(traced, 0, odd, true))...)
	if got := m.Ranges(); !slices.Equal(got, usual) {
		t.Errorf("%v", got)
	}
	if m = merged(t, m, TraceOf(traced, 0, odd, true)); len(m.Ranges()) != 3 {
		t.Errorf("read by two of six: %v", m.Ranges())
	}
	if got := merged(t, all[0], TraceOf(traced, 0, odd, true)).Ranges(); len(got) != 3 {
		t.Errorf("of two recordings all is expected: %v", got)
	}
}

// TestResidentComesLastAndCounts: what is only known to be in memory says
// nothing of the order.
func TestResidentComesLastAndCounts(t *testing.T) {
	ordered := TraceOf(traced, 0, []Range{kib(512, 4), kib(8, 4)}, true)
	m := merged(t, TraceOf(traced, 0, []Range{kib(0, 4), kib(8, 4), kib(512, 4)}, false), ordered)
	if got, want := m.Ranges(), []Range{kib(512, 4), kib(8, 4), kib(0, 4)}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if m.Pieces[0].Count != 2 || m.Pieces[0].Placed != 1 {
		t.Errorf("%+v", m.Pieces[0])
	}
}

func TestOldRecordingsAreForgotten(t *testing.T) {
	m := TraceOf(traced, 0, []Range{kib(0, 64)}, true)
	for range 4 * MaxRecordings {
		m = merged(t, m, TraceOf(traced, 0, []Range{kib(128, 64)}, true))
		if m.Recordings > MaxRecordings {
			t.Fatalf("%d recordings", m.Recordings)
		}
	}
	if len(m.Pieces) != 1 || m.Pieces[0].Range() != kib(128, 64) {
		t.Errorf("%+v", m.Pieces)
	}
}

func TestTracesAreBounded(t *testing.T) {
	var many, common []Range
	for i := range int64(2 * MaxTracePieces) {
		many = append(many, kib(8*(2*MaxTracePieces-i), 4))
	}
	common = many[MaxTracePieces+100 : MaxTracePieces+200]
	m := merged(t, TraceOf(traced, 0, many, true), TraceOf(traced, 0, common, true))
	if len(m.Pieces) > MaxTracePieces {
		t.Errorf("%d pieces", len(m.Pieces))
	}
	huge := TraceOf(traced, 0, []Range{{Off: 0, Len: MaxData}}, true)
	if huge.Bytes() != maxTraceBlocks*TraceBlock {
		t.Errorf("%d bytes", huge.Bytes())
	}
	other := TraceOf(traced, 0, []Range{{Off: MaxData / 2, Len: 2 << 30}}, true)
	both := merged(t, huge, other)
	if both.Bytes() != maxTraceBlocks*TraceBlock {
		t.Errorf("both: %d bytes", both.Bytes())
	}
	for _, x := range []Trace{m, huge, both} {
		if b, err := x.Encode(); err != nil || len(b) > MaxTrace {
			t.Errorf("%d bytes, %v", len(b), err)
		}
	}
}

func randomTrace(r *rand.Rand) Trace {
	var ranges []Range
	for range 1 + r.IntN(8) {
		ranges = append(ranges, Range{Off: r.Int64N(64) * TraceBlock, Len: 1 + r.Int64N(8*TraceBlock)})
	}
	return TraceOf(traced, time.Duration(r.Int64N(100)), ranges, r.IntN(4) > 0)
}

// TestMergingIsAddition: whatever the order in which recordings are merged, the
// trace is the same, it can be written, and it loses nothing.
func TestMergingIsAddition(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		a, b, c := randomTrace(r), randomTrace(r), randomTrace(r)
		left, right := merged(t, merged(t, a, b), c), merged(t, b, merged(t, c, a))
		if !reflect.DeepEqual(left, right) {
			t.Fatalf("%+v\n%+v", left, right)
		}
		if !reflect.DeepEqual(merged(t, a), a) {
			t.Fatalf("nothing added: %+v", a)
		}
		want := map[uint32]touches{}
		for _, x := range []Trace{a, b, c} {
			for n, t := range x.blocks() {
				h := want[n]
				want[n] = touches{h.count + t.count, h.placed + t.placed, h.sum + t.sum}
			}
		}
		if got := left.blocks(); !reflect.DeepEqual(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
		enc, err := left.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := DecodeTrace(enc, traced); err != nil || !reflect.DeepEqual(back, left) {
			t.Fatalf("%+v, %v", back, err)
		}
	}
}

// TestOrderIsThatOfAll: where recordings agree which of two blocks came first,
// so does the trace.
func TestOrderIsThatOfAll(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		order := r.Perm(40)
		var all []Trace
		for range 3 { // each reads all, but swaps some neighbours
			o := slices.Clone(order)
			for i := 0; i+1 < len(o); i += 2 {
				if r.IntN(2) == 0 {
					o[i], o[i+1] = o[i+1], o[i]
				}
			}
			var ranges []Range
			for _, n := range o {
				ranges = append(ranges, kib(int64(n)*8, 4))
			}
			all = append(all, TraceOf(traced, 0, ranges, true))
		}
		for i, p := range merged(t, all...).Pieces {
			if at := slices.Index(order, int(p.Block)/2); at/2 != i/2 {
				t.Fatalf("block %d, read as number %d, is number %d", p.Block, at, i)
			}
		}
	}
}

func TestMovedTrace(t *testing.T) {
	d := DigestOf([]byte("repacked"))
	tr := sampleTrace(t)
	same := tr.Moved(d, func(r Range) []Range { return []Range{r} })
	if same.Layer != d || !reflect.DeepEqual(same.Pieces, tr.Pieces) {
		t.Errorf("%+v", same)
	}
	up := tr.Moved(d, func(r Range) []Range {
		if r.Off == 0 {
			return nil // gone
		}
		return []Range{{Off: r.Off + 1<<20, Len: r.Len}}
	})
	if up.Bytes() != tr.Bytes()-TraceBlock || up.Recordings != tr.Recordings {
		t.Errorf("%+v", up)
	}
	if _, err := up.Encode(); err != nil {
		t.Error(err)
	}
}

func FuzzDecodeTrace(f *testing.F) {
	b, err := sampleTrace(f).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:60])
	f.Fuzz(func(t *testing.T, b []byte) {
		tr, err := DecodeTrace(b, traced)
		if err != nil {
			if !errors.Is(err, dsec.Corrupt.Err()) {
				t.Error(err)
			}
			return
		}
		if again, err := tr.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Error("accepted what it would not write", err)
		}
		// What was accepted can be merged and the outcome written: nobody can
		// poison a trace for good.
		m, err := MergeTraces(tr, tr)
		if err == nil {
			_, err = m.Encode()
		}
		if err != nil {
			t.Error(err)
		}
	})
}
