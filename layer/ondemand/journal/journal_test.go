package journal

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/opendsec/dsec"
)

// TestWhatIsLeft: messages that came and were not answered, and no others.
func TestWhatIsLeft(t *testing.T) {
	s := Shape{Slots: 2000, Size: 64}
	f, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	j, err := Open(context.Background(), f, s)
	if err != nil {
		t.Fatal(err)
	}
	if left := j.Left(); len(left) > 0 {
		t.Errorf("new: %v", left)
	}
	message := func(i int) { binary.NativeEndian.PutUint32(j.Take(i), 40) }
	message(0)
	message(7)
	message(1999)
	j.Take(8) // its reader is killed before a message comes
	message(9)
	j.Free(9)
	message(10)
	j.Free(10)
	j.Take(10) // likewise; what was in it is gone
	j.Close()
	if j, err = Open(context.Background(), f, s); err != nil {
		t.Fatal(err)
	}
	if left := j.Left(); !slices.Equal(left, []int{0, 7, 1999}) {
		t.Errorf("left: %v", left)
	}
	if n := binary.NativeEndian.Uint32(j.Slot(1999)); n != 40 {
		t.Errorf("the message begins with %d", n)
	}
	j.Close()
	if _, err := Open(context.Background(), f, Shape{Slots: 2000, Size: 128}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("of another shape: %v", err)
	}
}
