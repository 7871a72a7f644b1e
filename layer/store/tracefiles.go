package store

import (
	"cmp"
	"context"
	"os"
	"slices"
	"sort"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// TracedFile is what the recordings of a trace touched of a file.
type TracedFile struct {
	Path              string // the first of its names
	Size              int64
	Touched, Expected int64  // bytes
	Count             uint32 // recordings that touched the part that most did
}

// TracedFiles is the trace of a layer that is here, and the files that it speaks
// of, in the order in which they are first touched.
func (s *Store) TracedFiles(ctx context.Context, ref dsec.LayerRef) (layer.Trace, []TracedFile, error) {
	e, err := s.Inspect(ctx, ref)
	if err != nil {
		return layer.Trace{}, nil, err
	}
	t, err := s.Trace(ctx, e.Digest)
	if err != nil {
		return t, nil, err
	}
	files, err := s.traced(t, e.MetaSize)
	if err != nil {
		return t, nil, diskError("read trace", string(e.Digest), err)
	}
	return t, files, nil
}

// extent is a run of a file.
type extent struct {
	from, to int64 // bytes of the data file
	file     *TracedFile
}

func (s *Store) traced(t layer.Trace, metaSize int64) ([]TracedFile, error) {
	extents, err := s.extents(t.Layer, metaSize)
	if err != nil {
		return nil, err
	}
	var order []*TracedFile
	for _, p := range t.Pieces {
		r := p.Range()
		i := sort.Search(len(extents), func(i int) bool { return extents[i].to > r.Off })
		for ; i < len(extents) && extents[i].from < r.Off+r.Len; i++ {
			f := extents[i].file
			if f.Touched == 0 {
				order = append(order, f)
			}
			n := min(extents[i].to, r.Off+r.Len) - max(extents[i].from, r.Off)
			if f.Touched += n; t.Expected(p) {
				f.Expected += n
			}
			f.Count = max(f.Count, p.Count)
		}
	}
	out := make([]TracedFile, len(order))
	for i, f := range order {
		out[i] = *f
	}
	return out, nil
}

// extents are the runs of all files of a layer, in the order of the data.
func (s *Store) extents(d layer.Digest, metaSize int64) ([]extent, error) {
	meta, err := os.Open(s.path("layers", d.Hex(), layer.MetaFile))
	if err != nil {
		return nil, err
	}
	defer meta.Close()
	im, err := erofs.Open(meta, metaSize, nil)
	if err != nil {
		return nil, err
	}
	var out []extent
	seen := map[uint64]bool{}
	err = im.Walk(func(path string, n *erofs.Node) error {
		if n.Mode&erofs.TypeMask != erofs.TypeRegular || seen[n.NID] {
			return nil
		}
		seen[n.NID] = true
		runs, err := n.Runs()
		f := &TracedFile{Path: path, Size: n.Size}
		for _, r := range runs {
			from := int64(r.Block) * erofs.BlockSize
			out = append(out, extent{from: from, to: from + int64(r.Count)*erofs.BlockSize, file: f})
		}
		return err
	})
	slices.SortFunc(out, func(a, b extent) int { return cmp.Compare(a.from, b.from) })
	return out, err
}
