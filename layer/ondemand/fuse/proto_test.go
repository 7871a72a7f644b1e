package fuse

import "testing"

// FuzzParse: whatever a journal has, reading it ends.
func FuzzParse(f *testing.F) {
	read := make([]byte, inHeader+40)
	le.PutUint32(read, uint32(len(read)))
	le.PutUint32(read[4:], opRead)
	le.PutUint64(read[inHeader+8:], 4096)
	le.PutUint32(read[inHeader+16:], 100)
	r, err := parse(read)
	if err != nil {
		f.Fatal(err)
	}
	if off, n, err := r.readRange(); off != 4096 || n != 100 || err != nil {
		f.Fatal(off, n, err)
	}
	f.Add(read)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parse(b)
		if err != nil {
			return
		}
		_, _, _ = r.readRange() // an error, or not
		if r.op == opInit {
			r.init()
		}
		if len(r.body) > len(b)-inHeader {
			t.Errorf("a body of %d of %d bytes", len(r.body), len(b))
		}
	})
}
