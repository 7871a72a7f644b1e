package layer

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// The format, see docs/formats/layer.md.
const (
	ManifestVersion = 2
	MaxManifest     = 1 << 20  // bytes
	MaxMeta         = 16 << 30 // bytes of a metadata file
	MaxData         = 1 << 44  // bytes of a data file
)

// Manifest says what a layer is. The digest of its encoding is the digest of
// the layer, so it covers every byte of both files.
type Manifest struct {
	Version int           `json:"version"`
	Meta    Content       `json:"meta"`
	Data    Chunked       `json:"data"`
	Entries int64         `json:"entries"`
	Config  *image.Config `json:"config,omitempty"`
}

// Content is a file that is read whole.
type Content struct {
	Digest Digest `json:"digest"`
	Size   int64  `json:"size"`
}

// Chunked is a file that is read in pieces: Chunks is the digest of the table of
// its pieces, see Index.Table.
type Chunked struct {
	Size   int64  `json:"size"`
	Count  int64  `json:"count,omitempty"`
	Chunks Digest `json:"chunks,omitempty"` // empty when Size is 0
}

// Encode returns the one encoding of the manifest.
func (m Manifest) Encode() []byte {
	b, err := json.Marshal(m)
	if err != nil { // strings and integers only
		panic(err)
	}
	return append(b, '\n')
}

// Digest names the layer.
func (m Manifest) Digest() Digest { return DigestOf(m.Encode()) }

// DecodeManifest reads an encoding, which must be the one that Encode gives,
// and must have the digest.
func DecodeManifest(b []byte, want Digest) (Manifest, error) {
	const op = "read manifest"
	if len(b) > MaxManifest {
		return Manifest{}, dsec.Errorf(dsec.Corrupt, op, string(want), "%d bytes, at most %d", len(b), MaxManifest)
	}
	if got := DigestOf(b); got != want {
		return Manifest{}, dsec.Errorf(dsec.Corrupt, op, string(want), "content has digest %s", got)
	}
	var m Manifest
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return Manifest{}, dsec.E(dsec.Corrupt, op, string(want), err)
	}
	if err := m.check(); err != nil {
		return Manifest{}, dsec.E(dsec.Corrupt, op, string(want), err)
	}
	if !bytes.Equal(m.Encode(), b) {
		return Manifest{}, dsec.Errorf(dsec.Corrupt, op, string(want), "not in canonical form")
	}
	return m, nil
}

func (m Manifest) check() error {
	if m.Version != ManifestVersion {
		return fmt.Errorf("version %d, this program knows %d", m.Version, ManifestVersion)
	}
	if _, err := ParseDigest(string(m.Meta.Digest)); err != nil {
		return err
	}
	if m.Meta.Size <= 0 || m.Meta.Size > MaxMeta || m.Entries < 1 {
		return fmt.Errorf("metadata of %d bytes and %d entries", m.Meta.Size, m.Entries)
	}
	if m.Data.Size == 0 {
		if m.Data.Chunks != "" || m.Data.Count != 0 {
			return fmt.Errorf("chunks without data")
		}
		return nil
	}
	if m.Data.Size < 0 || m.Data.Size > MaxData || m.Data.Count < 1 || m.Data.Count > MaxChunks {
		return fmt.Errorf("data of %d bytes in %d chunks", m.Data.Size, m.Data.Count)
	}
	_, err := ParseDigest(string(m.Data.Chunks))
	return err
}

// Describe fills a manifest from the two files and returns the chunks of data,
// whose places are nowhere yet. borders are those of large files, see NewCutter.
func Describe(meta, data io.Reader, borders []int64) (m Manifest, ix Index, err error) {
	m.Version = ManifestVersion
	h := sha256.New()
	if m.Meta.Size, err = io.Copy(h, meta); err != nil {
		return m, ix, err
	}
	m.Meta.Digest = FromSum(h.Sum(nil))
	if ix.Chunks, err = hashed(NewCutter(data, borders)); err != nil {
		return m, ix, err
	}
	for _, c := range ix.Chunks {
		m.Data.Size += int64(c.Size)
	}
	if m.Data.Size > 0 {
		m.Data.Count, m.Data.Chunks = int64(len(ix.Chunks)), DigestOf(ix.Table())
	}
	return m, ix, nil
}

// hashed are the chunks of a cutter, which are hashed by all CPUs: it is what
// making a layer waits for last.
func hashed(cutter *Cutter) ([]Chunk, error) {
	var (
		all     []*Chunk
		g       errgroup.Group
		buffers = sync.Pool{New: func() any { return new([cutMost]byte) }}
	)
	g.SetLimit(runtime.GOMAXPROCS(0))
	defer func() { _ = g.Wait() }() // nothing it runs errs
	for {
		b, err := cutter.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if len(all) == MaxChunks {
			return nil, fmt.Errorf("data in more than %d chunks", MaxChunks)
		}
		c, own := &Chunk{Size: uint32(len(b))}, buffers.Get().(*[cutMost]byte)
		copy(own[:], b)
		all = append(all, c)
		g.Go(func() error {
			c.Sum = sha256.Sum256(own[:c.Size])
			buffers.Put(own)
			return nil
		})
	}
	_ = g.Wait()
	chunks := make([]Chunk, len(all))
	for i, c := range all {
		chunks[i] = *c
	}
	return chunks, nil
}
