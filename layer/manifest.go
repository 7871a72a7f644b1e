package layer

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// The format, see docs/formats/layer.md.
const (
	ManifestVersion = 1
	ChunkSize       = 256 << 10 // bytes of plain data that one digest covers
	MaxManifest     = 1 << 20   // bytes
	MaxMeta         = 16 << 30  // bytes of a metadata file
	MaxData         = 1 << 44   // bytes of a data file
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

// Chunked is a file that is read in pieces: Chunks is the digest of the list of
// the SHA-256 sums of its pieces, 32 bytes each, in order.
type Chunked struct {
	Size      int64  `json:"size"`
	ChunkSize int64  `json:"chunk_size"`
	Chunks    Digest `json:"chunks,omitempty"` // empty when Size is 0
}

// Count is the number of pieces.
func (c Chunked) Count() int64 {
	if c.ChunkSize <= 0 {
		return 0
	}
	return (c.Size + c.ChunkSize - 1) / c.ChunkSize
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
		if m.Data.Chunks != "" {
			return fmt.Errorf("chunks without data")
		}
		return nil
	}
	if m.Data.Size < 0 || m.Data.Size > MaxData || m.Data.ChunkSize != ChunkSize {
		return fmt.Errorf("data of %d bytes in chunks of %d", m.Data.Size, m.Data.ChunkSize)
	}
	_, err := ParseDigest(string(m.Data.Chunks))
	return err
}

// Describe fills a manifest from the two files and returns the sums of the
// chunks of data.
func Describe(meta io.Reader, data io.Reader) (m Manifest, sums []byte, err error) {
	m.Version = ManifestVersion
	h := sha256.New()
	if m.Meta.Size, err = io.Copy(h, meta); err != nil {
		return m, nil, err
	}
	m.Meta.Digest = FromSum(h.Sum(nil))
	m.Data.ChunkSize = ChunkSize
	buf := make([]byte, ChunkSize)
	for {
		n, err := io.ReadFull(data, buf)
		if n > 0 {
			sum := sha256.Sum256(buf[:n])
			sums = append(sums, sum[:]...)
			m.Data.Size += int64(n)
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		}
		if err != nil {
			return m, nil, err
		}
	}
	if m.Data.Size > 0 {
		m.Data.Chunks = DigestOf(sums)
	}
	return m, sums, nil
}
