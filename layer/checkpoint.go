package layer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// The format, see docs/formats/checkpoint.md.
const (
	CheckpointVersion   = 1
	MaxCheckpoint       = 4 << 20   // bytes of a manifest
	maxCheckpointOwner  = 128       // bytes of a project's name
	maxCheckpointDetail = 256 << 10 // bytes of what a tier says
)

// Checkpoint says what a sandbox was at one moment. The digest of its encoding is
// its digest, so it covers every byte of disk and memory.
type Checkpoint struct {
	Version int             `json:"version"`
	Project string          `json:"project"` // whose it is, and nobody else's
	Sandbox dsec.SandboxID  `json:"sandbox"`
	Time    time.Time       `json:"time"`
	Spec    dsec.Spec       `json:"spec"` // of what goes on from it; its layers are digests
	Config  image.Config    `json:"config,omitzero"`
	Machine json.RawMessage `json:"machine"` // the tier's own
	Disk    Chunked         `json:"disk"`
	Memory  Chunked         `json:"memory"`
}

// MomentFiles are the two files of a machine that stands still.
type MomentFiles struct {
	Disk   *os.File
	Memory *os.File
}

// Checkpoints keeps sandboxes as they were at one moment where all nodes find them.
type Checkpoints interface {
	// KeepCheckpoint stores what the files hold, whose sizes and sums it adds to c, and keeps
	// it until that time. Unsupported where there is no storage that other nodes see.
	KeepCheckpoint(ctx context.Context, c Checkpoint, f MomentFiles, until time.Time) (Digest, Checkpoint, error)
	// FindCheckpoint reads what one is, verified. To every project but its own it is NotFound,
	// as one that is not there.
	FindCheckpoint(ctx context.Context, project string, d Digest) (Checkpoint, error)
	// FetchCheckpoint writes what one holds to empty files, each byte verified before it is written.
	// After an error they hold nothing of value.
	FetchCheckpoint(ctx context.Context, d Digest, c Checkpoint, f MomentFiles) error
}

// CheckpointKey is where the manifest of a checkpoint is.
func CheckpointKey(d Digest) string { return KindCheckpoint.Key(d) }

// Encode returns the encoding.
func (c Checkpoint) Encode() ([]byte, error) {
	b, err := json.Marshal(c)
	if err != nil { // of a Machine that is no JSON
		return nil, dsec.E(dsec.Internal, "encode checkpoint", string(c.Sandbox), err)
	}
	return append(b, '\n'), nil
}

// DecodeCheckpoint reads an encoding, which must have the digest. Another version is
// Unsupported, everything else that is wrong Corrupt.
func DecodeCheckpoint(b []byte, want Digest) (Checkpoint, error) {
	const op = "read checkpoint"
	if len(b) > MaxCheckpoint {
		return Checkpoint{}, dsec.Errorf(dsec.Corrupt, op, string(want), "more than %d bytes", MaxCheckpoint)
	}
	if got := DigestOf(b); got != want {
		return Checkpoint{}, dsec.Errorf(dsec.Corrupt, op, string(want), "content has digest %s", got)
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return Checkpoint{}, dsec.E(dsec.Corrupt, op, string(want), err)
	}
	if head.Version != CheckpointVersion {
		return Checkpoint{}, dsec.Errorf(dsec.Unsupported, op, string(want), "version %d, this program knows %d", head.Version, CheckpointVersion)
	}
	var c Checkpoint
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err := d.Decode(&c)
	if err == nil {
		if _, more := d.Token(); more != io.EOF {
			err = errors.New("something follows it")
		}
	}
	if err == nil {
		err = c.check()
	}
	if err != nil {
		return Checkpoint{}, dsec.E(dsec.Corrupt, op, string(want), err)
	}
	return c, nil
}

func (c Checkpoint) check() error {
	if c.Project == "" || len(c.Project) > maxCheckpointOwner {
		return fmt.Errorf("a project of %d bytes", len(c.Project))
	}
	if len(c.Machine) == 0 || len(c.Machine) > maxCheckpointDetail {
		return fmt.Errorf("a machine described in %d bytes, want 1 to %d", len(c.Machine), maxCheckpointDetail)
	}
	if _, _, err := dsec.ParseSandboxID(string(c.Sandbox)); err != nil {
		return err
	}
	if c.Spec.Name != "" || c.Spec.CallID != "" || c.Spec.Checkpoint != "" {
		return errors.New("a spec with a name, a call id or a checkpoint")
	}
	if err := c.Spec.Validate(); err != nil {
		return err
	}
	for _, ref := range append([]dsec.LayerRef{c.Spec.Image}, c.Spec.Layers...) {
		if _, err := ParseDigest(string(ref)); err != nil {
			return err
		}
	}
	return errors.Join(c.Disk.checkFull("disk"), c.Memory.checkFull("memory"))
}

// checkFull refuses what is empty or too large.
func (c Chunked) checkFull(what string) error {
	if c.Size <= 0 || c.Size > MaxData || c.Count < 1 || c.Count > MaxChunks || c.Count > c.Size {
		return fmt.Errorf("a %s of %d bytes in %d chunks", what, c.Size, c.Count)
	}
	_, err := ParseDigest(string(c.Chunks))
	return err
}
