package gc

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// Checked is what Verify found.
type Checked struct {
	Objects Count    `json:"objects"` // that were read
	Chunks  int64    `json:"chunks"`  // that were unpacked and compared; one in several indexes counts once a pack
	Layers  int      `json:"layers"`
	Stacks  int      `json:"stacks"`
	Damaged []Damage `json:"damaged,omitempty"` // by key; missing objects, too
}

// Hit lists the layers that cannot be used for what is damaged.
func (c Checked) Hit() []layer.Digest {
	seen := map[layer.Digest]bool{}
	for _, d := range c.Damaged {
		for _, l := range d.Layers {
			seen[l] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// VerifyOptions say how to read a store.
type VerifyOptions struct {
	Dir      string                  // for packs while they are read; "": the system's
	Progress func(done, total int64) // bytes; may be nil, called from one goroutine at a time
}

const (
	maxPlaces      = 4 << 20 // chunks whose places are held in memory
	packsAtOneTime = 4
)

// Verify reads every object of a store and compares it with its name, every
// chunk of every pack with its sum, and looks for what is needed and not there.
// What is deleted meanwhile is not missed. The error is of a store that cannot be
// read; what is damaged is in the report.
func Verify(ctx context.Context, blobs blob.Store, o VerifyOptions) (Checked, error) {
	v := &verifier{blobs: blobs, o: o, bad: map[string]error{}, zero: map[uint32][sha256.Size]byte{}}
	if err := v.w.read(ctx, blobs); err != nil {
		return Checked{}, dsec.E(dsec.ClassOf(err), "verify store", "", err)
	}
	for _, obj := range v.w.objects {
		v.total += obj.size
	}
	err := v.all(ctx)
	if err != nil {
		err = dsec.E(dsec.ClassOf(err), "verify store", "", err)
	}
	return v.report(), err
}

type verifier struct {
	blobs blob.Store
	o     VerifyOptions
	w     world
	zero  map[uint32][sha256.Size]byte // sums of zeros, by their number

	mu          sync.Mutex
	bad         map[string]error // by key
	done, total int64
	checked     Checked
}

func (v *verifier) all(ctx context.Context) error {
	for key, err := range v.w.broken {
		v.bad[key] = err
		v.count(v.w.objects[key].size)
	}
	for key, needs := range v.w.needs {
		for _, need := range needs {
			if _, ok := v.w.objects[need]; !ok {
				// It may have been written, or both deleted, since the list was made.
				if err := v.missing(ctx, key, need); err != nil {
					return err
				}
			}
		}
		v.count(v.w.objects[key].size)
	}
	if err := v.metas(ctx); err != nil {
		return err
	}
	return v.packs(ctx)
}

func (v *verifier) missing(ctx context.Context, key, need string) error {
	for _, k := range []string{need, key} {
		_, err := v.blobs.Stat(ctx, k)
		switch class := dsec.ClassOf(err); {
		case err != nil && class != dsec.NotFound:
			return err
		case k == need && err != nil:
			continue
		case k == need:
			return nil
		case err == nil:
			v.damaged(need, dsec.Errorf(dsec.NotFound, "verify object", need, "is needed and not there"))
		}
	}
	return nil
}

func (v *verifier) damaged(key string, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.bad[key] = err
}

func (v *verifier) count(bytes int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.checked.Objects.add(bytes)
	v.done += bytes
	if v.o.Progress != nil {
		v.o.Progress(v.done, v.total)
	}
}

// of lists the keys of a kind in their order.
func (v *verifier) of(kind layer.Kind) (keys []string) {
	for key := range v.w.objects {
		if strings.HasPrefix(key, string(kind)+"/") {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// note takes the result of one object: what is not there any more is no damage.
func (v *verifier) note(key string, err error) error {
	switch class := dsec.ClassOf(err); {
	case err == nil:
	case class == dsec.Corrupt:
		v.damaged(key, err)
	case class != dsec.NotFound:
		return err
	}
	v.count(v.w.objects[key].size)
	return nil
}

func (v *verifier) metas(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(atOneTime)
	for _, key := range v.of(layer.KindMeta) {
		g.Go(func() error { return v.note(key, v.meta(gctx, key)) })
	}
	return g.Wait()
}

func (v *verifier) meta(ctx context.Context, key string) error {
	_, d, err := layer.ParseKey(key)
	if err != nil {
		return err
	}
	r, err := v.blobs.Open(ctx, key, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	from := &sourced{r: r}
	z, err := zstd.NewReader(from, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	h := sha256.New()
	if _, err := io.Copy(h, io.LimitReader(z, layer.MaxMeta+1)); err != nil {
		if from.err != nil {
			return from.err
		}
		return dsec.E(dsec.Corrupt, "verify metadata", key, err)
	}
	if layer.FromSum(h.Sum(nil)) != d {
		return dsec.Errorf(dsec.Corrupt, "verify metadata", key, "content has another digest")
	}
	return nil
}

// sourced remembers what went wrong below a decoder.
type sourced struct {
	r   io.Reader
	err error
}

func (s *sourced) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// report adds to what is damaged which layers that hits.
func (v *verifier) report() Checked {
	c := v.checked
	c.Layers, c.Stacks = len(v.of(layer.KindManifest)), len(v.of(layer.KindStack))
	hit := v.w.users()
	for key, err := range v.bad {
		c.Damaged = append(c.Damaged, Damage{Key: key, Error: err.Error(), Layers: hit[key]})
	}
	slices.SortFunc(c.Damaged, byKey)
	return c
}

// users maps every key to the layers that need it.
func (w *world) users() map[string][]layer.Digest {
	users := map[string][]layer.Digest{}
	for key := range w.objects {
		kind, d, err := layer.ParseKey(key)
		if err != nil || kind != layer.KindManifest && kind != layer.KindCheckpoint {
			continue
		}
		seen := map[string]bool{}
		w.reach(seen, key)
		for need := range seen {
			users[need] = append(users[need], d)
		}
	}
	for _, list := range users {
		slices.Sort(list)
	}
	return users
}

// spool brings a pack to a file without a name and compares it with its own.
func (v *verifier) spool(ctx context.Context, key string) (f *os.File, err error) {
	_, d, err := layer.ParseKey(key)
	if err != nil {
		return nil, err
	}
	if f, err = os.CreateTemp(v.o.Dir, "verify-*"); err != nil {
		return nil, err
	}
	err = os.Remove(f.Name())
	var r io.ReadCloser
	if err == nil {
		r, err = v.blobs.Open(ctx, key, 0, -1)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	defer r.Close()
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(f, h), r); err != nil {
		f.Close()
		return nil, err
	}
	if layer.FromSum(h.Sum(nil)) != d {
		f.Close()
		return nil, dsec.E(dsec.Corrupt, "verify pack", key, fmt.Errorf("content has another digest"))
	}
	return f, nil
}
