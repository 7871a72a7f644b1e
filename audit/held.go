package audit

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
)

// heldMagic begins the file of what is held back; its last byte is the version.
const heldMagic = "dsechld1"

const (
	slotBytes = 4096
	mostSlots = 2048
	slotCount = 8  // bytes of the number of events
	slotID    = 64 // bytes of the sandbox, filled up with zeros
	slotFixed = slotCount + slotID
)

// held has a copy of what is folded and not yet in a log, in a file of slots: who is killed
// leaves it to the next process. It is written and not mapped: a disk that is full
// is an error then, and no signal.
type held struct {
	mu   sync.Mutex
	file *os.File
	free []int // numbers of slots, from 1: the first place has the magic
	next int   // that was never used
}

// slot is that of one fold.
type slot struct {
	of     *held
	number int
	count  int64
}

// openHeld makes the file anew if there is none, or one of another version.
func openHeld(path string) (*held, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	begin := make([]byte, len(heldMagic))
	if _, err = f.ReadAt(begin, 0); err == nil && string(begin) == heldMagic {
		return &held{file: f}, nil
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.Join(err, f.Close())
	}
	if err = f.Truncate(0); err == nil {
		_, err = f.WriteAt([]byte(heldMagic), 0)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &held{file: f}, nil
}

// left hands out what an earlier process held back, and forgets it.
func (h *held) left(take func(dsec.SandboxID, dsec.AuditRecord)) error {
	b := make([]byte, slotBytes)
	for n := 1; n <= mostSlots; n++ {
		m, err := h.file.ReadAt(b, int64(n)*slotBytes)
		if m == 0 {
			break
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if id, r, ok := decodeSlot(b[:m]); ok {
			take(id, r)
		}
	}
	return h.file.Truncate(slotBytes)
}

// decodeSlot reads a slot; !ok if nothing is held in it.
func decodeSlot(b []byte) (id dsec.SandboxID, r dsec.AuditRecord, ok bool) {
	if len(b) < slotFixed {
		return "", r, false
	}
	n := binary.LittleEndian.Uint64(b)
	if n == 0 || n > 1<<62 {
		return "", r, false
	}
	id = dsec.SandboxID(bytes.TrimRight(b[slotCount:slotFixed], "\x00"))
	r, _, err := decodeFrame(b[slotFixed:])
	if err != nil {
		return "", r, false
	}
	r.Count = 0
	if n > 1 {
		r.Count = int64(n)
	}
	return id, r, true
}

// take holds back a record; nil: it cannot, and the record is to be written.
func (h *held) take(id dsec.SandboxID, r *dsec.AuditRecord) *slot {
	b := make([]byte, slotFixed, slotBytes)
	if len(id) > slotID {
		return nil
	}
	copy(b[slotCount:], id)
	count := max(1, r.Count)
	binary.LittleEndian.PutUint64(b, uint64(count))
	c := *r
	cut(&c)
	b, err := appendFrame(b, &c)
	if err != nil || len(b) > slotBytes {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.next + 1
	if len(h.free) > 0 {
		n = h.free[len(h.free)-1]
	}
	if n > mostSlots {
		return nil
	}
	if _, err := h.file.WriteAt(b, int64(n)*slotBytes); err != nil {
		return nil
	}
	if n > h.next {
		h.next = n
	} else {
		h.free = h.free[:len(h.free)-1]
	}
	return &slot{of: h, number: n, count: count}
}

// add counts more of the same; !ok: they could not be.
func (s *slot) add(n int64) (ok bool) {
	_, err := s.of.file.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(s.count+n)), int64(s.number)*slotBytes)
	if err == nil {
		s.count += n
	}
	return err == nil
}

// release is called when the record is in the log. A slot that cannot be emptied is not used
// again: the next process tells once more what is in it.
func (h *held) release(all []*slot) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, s := range slices.Backward(all) {
		if _, err := h.file.WriteAt(make([]byte, slotCount), int64(s.number)*slotBytes); err != nil {
			errs = append(errs, err)
			continue
		}
		h.free = append(h.free, s.number)
	}
	return errors.Join(errs...)
}

func (h *held) close() error { return h.file.Close() }
