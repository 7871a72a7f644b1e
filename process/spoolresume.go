package process

import (
	"errors"
	"os"
	"slices"
	"time"
)

// SpoolState is a SpoolWriter on its way to the next program that goes on with
// it; the file, if there is one, goes beside it.
type SpoolState struct {
	Header   SpoolHeader
	Memory   []byte // the stream, while there is no file
	Filed    bool   // there is a file, which is closed at the end of the stream
	Lost     string // why the file could not be made; "" if it could, or is not needed yet
	SeenFrom int64  // [SeenFrom, SeenTo) was read by followers
	SeenTo   int64
	LostTo   int64 // bytes before this position were refused by the disk

	Followers []int64 // positions that followers have read up to; 0 is one that is expected
}

// State returns what ResumeSpoolWriter needs, and the file, which stays the
// writer's. Nobody may write meanwhile.
func (w *SpoolWriter) State() (SpoolState, *os.File) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := SpoolState{Header: w.h, Memory: w.mem, Filed: w.f != nil, SeenFrom: w.seenFrom, SeenTo: w.seenTo, LostTo: w.lostTo}
	if w.lost {
		s.Lost = w.why.Error()
	}
	if time.Now().Before(w.expected) {
		s.Followers = append(s.Followers, 0)
	}
	for c := range w.followers {
		s.Followers = append(s.Followers, c.acked)
	}
	slices.Sort(s.Followers)
	return s, w.f
}

// ResumeSpoolWriter goes on where State was. It owns f, which is nil if there
// was no file or it was closed. Followers have to come again.
func ResumeSpoolWriter(s SpoolState, f *os.File, create func() (*os.File, error)) (*SpoolWriter, error) {
	if _, err := DecodeSpoolHeader(s.Header.Encode()); err != nil {
		return nil, err
	}
	if s.Filed && f == nil {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return nil, err
		}
		f = null
		_ = f.Close() // nothing is written any more
	}
	w := &SpoolWriter{create: create, f: f, mem: s.Memory, lost: s.Lost != "", h: s.Header, seenFrom: s.SeenFrom, seenTo: s.SeenTo,
		lostTo: s.LostTo, followers: map[*Cursor]struct{}{}, space: make(chan struct{}, 1)}
	if w.lost {
		w.why = errors.New(s.Lost)
	}
	return w, nil
}
