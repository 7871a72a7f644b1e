package ondemandtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// reading is what a reader is told in its environment. It reads the tree of a
// mount (its descriptor 3) and compares it with the tree it was made of.
type reading struct {
	Tree   string
	File   string        // only this one; "": all
	Mapped bool          // by mmap
	For    time.Duration // 0: everything once; else pieces at random, cold ones
	Limit  int64         // bytes of each file to read; 0: all
}

const mountFD = 3

func read(raw []byte) error {
	var r reading
	if err := json.Unmarshal(raw, &r); err != nil {
		return err
	}
	var names []string
	err := filepath.WalkDir(r.Tree, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(r.Tree, p)
		if r.File == "" || r.File == rel {
			names = append(names, rel)
		}
		return err
	})
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("nothing to read in %s", r.Tree)
	}
	if r.For > 0 {
		return r.pieces(names)
	}
	for _, n := range names {
		if err := r.whole(n); err != nil {
			return err
		}
	}
	return nil
}

// pair opens a file of the mount and the one it was made of.
func (r *reading) pair(name string) (fd int, want []byte, err error) {
	if want, err = os.ReadFile(filepath.Join(r.Tree, name)); err != nil {
		return -1, nil, err
	}
	// Not by os.Open: the runtime would try to wait for events of it.
	fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d/%s", mountFD, name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, nil, fmt.Errorf("open %s: %w", name, err)
	}
	return fd, want, nil
}

func (r *reading) whole(name string) error {
	fd, want, err := r.pair(name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if r.Limit > 0 {
		want = want[:min(r.Limit, int64(len(want)))]
	}
	if len(want) == 0 {
		return nil
	}
	if r.Mapped {
		m, err := unix.Mmap(fd, 0, len(want), unix.PROT_READ, unix.MAP_PRIVATE)
		if err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
		defer unix.Munmap(m)
		if !bytes.Equal(m, want) {
			return fmt.Errorf("%s: wrong bytes in a mapping", name)
		}
		return nil
	}
	return same(fd, name, want, 0)
}

// same reads what should be want.
func same(fd int, name string, want []byte, off int64) error {
	b := make([]byte, len(want))
	for got := 0; got < len(b); {
		n, err := unix.Pread(fd, b[got:], off+int64(got))
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return fmt.Errorf("read %s at %d: %d bytes: %w", name, off+int64(got), n, err)
		}
		got += n
	}
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("%s: wrong byte at %d: %#x, not %#x", name, off+int64(i), b[i], want[i])
		}
	}
	return nil
}

// pieces reads at random and has what it read forgotten.
func (r *reading) pieces(names []string) error {
	end := time.Now().Add(r.For)
	var n atomic.Int64
	errs := make([]error, 8)
	var all sync.WaitGroup
	for w := range errs {
		all.Go(func() {
			for errs[w] == nil && time.Now().Before(end) {
				errs[w] = r.piece(names[rand.IntN(len(names))])
				n.Add(1)
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	fmt.Println(n.Load())
	return nil
}

func (r *reading) piece(name string) error {
	fd, want, err := r.pair(name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if len(want) == 0 {
		return nil
	}
	for range 4 {
		off := rand.IntN(len(want))
		n := min(len(want)-off, 1+rand.IntN(200<<10))
		if err := same(fd, name, want[off:off+n], int64(off)); err != nil {
			return err
		}
	}
	return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
}
