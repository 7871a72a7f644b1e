package accounts

import (
	"errors"
	"slices"
	"testing"

	"github.com/opendsec/dsec"
)

func TestRangesAreNeverShared(t *testing.T) {
	r := NewRanges(1<<20, 3)
	var got []uint32
	for _, id := range []dsec.SandboxID{"a", "b", "c"} {
		u, err := r.Take(id)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, u)
	}
	if want := []uint32{1 << 20, 1<<20 + 65536, 1<<20 + 2*65536}; !slices.Equal(got, want) {
		t.Fatalf("ranges %v, want %v", got, want)
	}
	if _, err := r.Take("d"); !errors.Is(err, dsec.ResourceExhausted.Err()) {
		t.Fatalf("a fourth of three: %v", err)
	}
	r.Give(got[1], "a") // not its owner
	if _, err := r.Take("d"); err == nil {
		t.Fatal("a range was given back by somebody else")
	}
	r.Give(got[1], "b")
	if u, err := r.Take("d"); err != nil || u != got[1] {
		t.Fatalf("%d, %v", u, err)
	}
	if err := r.Adopt(got[0], "x"); err == nil {
		t.Fatal("a range with an owner was adopted")
	}
	r.Pass(got[0], "x", "y") // not its owner's to give
	r.Pass(got[0], "a", "y")
	r.Give(got[0], "a")
	if n := r.InUse(); n != 3 {
		t.Fatalf("%d ranges in use: one was given back by who had passed it on", n)
	}
	if r.Give(got[0], "y"); r.InUse() != 2 {
		t.Fatal("the new owner gave it back in vain")
	}
	if n := NewRanges(1<<32-1-65536, 0).n; n != 1 {
		t.Fatalf("%d ranges at the end of the ids", n)
	}
}
