package chunking

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
)

// Open maps the data file of a layer and reads where its files are.
func Open(name, meta, data string, size int64) (*Data, error) {
	d := &Data{Name: name}
	m, err := os.Open(meta)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	st, err := m.Stat()
	if err != nil {
		return nil, err
	}
	im, err := erofs.Open(m, st.Size(), nil)
	if err != nil {
		return nil, fmt.Errorf("read layer %s: %w", name, err)
	}
	seen := map[uint64]bool{}
	err = im.Walk(func(_ string, n *erofs.Node) error {
		if n.Mode&erofs.TypeMask != erofs.TypeRegular || seen[n.NID] {
			return nil
		}
		seen[n.NID] = true
		runs, err := n.Runs()
		for _, r := range runs {
			d.Files = append(d.Files, Extent{int64(r.Block) * Block, int64(r.Count) * Block})
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read layer %s: %w", name, err)
	}
	slices.SortFunc(d.Files, func(a, b Extent) int { return cmp.Compare(a.Off, b.Off) })
	if size == 0 {
		return d, nil
	}
	f, err := os.Open(data)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d.Bytes, err = unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	return d, err
}

// Close unmaps the data.
func (d *Data) Close() error {
	if d.Bytes == nil {
		return nil
	}
	b := d.Bytes
	d.Bytes = nil
	return unix.Munmap(b)
}

// window is what the kernel reads of a file at one time.
const window = 128 << 10

// RandomFiles reads a share of the files whole, one after the other in no
// order; the same ones each time.
func RandomFiles(d *Data, share float64) (Access, error) {
	a := Access{Name: fmt.Sprintf("%s: %.0f %% of the files", d.Name, 100*share)}
	r := rand.New(rand.NewPCG(5, uint64(len(d.Files))))
	n := int(share * float64(len(d.Files)))
	if n == 0 {
		return a, errors.New("read some files of " + d.Name + ": it has too few")
	}
	for _, i := range r.Perm(len(d.Files))[:n] {
		f := d.Files[i]
		for off := int64(0); off < f.Len; off += window {
			a.Reads = append(a.Reads, Read{d.Name, Extent{f.Off + off, min(window, f.Len-off)}})
		}
	}
	return a, nil
}
