package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
)

var _ layer.Checkpoints = (*Store)(nil)

const checkpointDir = "checkpoints"

// keeping is what a store notes of a checkpoint that it has made.
type keeping struct {
	Until time.Time `json:"until"`
}

// KeepCheckpoint implements layer.Checkpoints.
func (s *Store) KeepCheckpoint(ctx context.Context, c layer.Checkpoint, f layer.MomentFiles, until time.Time) (layer.Digest, layer.Checkpoint, error) {
	const op = "keep checkpoint"
	if s.opts.Blobs == nil {
		return "", c, dsec.Errorf(dsec.Unsupported, op, string(c.Sandbox), "there is no object storage")
	}
	disk, err := describeSparse(ctx, f.Disk)
	if err != nil {
		return "", c, diskError(op, string(c.Sandbox), err)
	}
	memory, err := describeSparse(ctx, f.Memory)
	if err != nil {
		return "", c, diskError(op, string(c.Sandbox), err)
	}
	c.Version, c.Disk, c.Memory = layer.CheckpointVersion, disk.names, memory.names
	b, err := c.Encode()
	if err != nil {
		return "", c, err
	}
	d := layer.DigestOf(b)
	if _, err := layer.DecodeCheckpoint(b, d); err != nil { // nobody could go on from it
		return "", c, dsec.E(dsec.Internal, op, string(c.Sandbox), err)
	}
	for try := 1; ; try++ {
		err := s.tryKeepCheckpoint(ctx, d, b, until, disk, memory)
		if gone, ok := errors.AsType[*collectedError](err); ok && try < pushTries {
			s.opts.Log.Info("what a checkpoint relied on was collected; once more", "checkpoint", d)
			continue
		} else if ok {
			err = dsec.E(dsec.Unavailable, op, string(d), gone)
		}
		return d, c, diskError(op, string(d), err)
	}
}

func (s *Store) tryKeepCheckpoint(ctx context.Context, d layer.Digest, manifest []byte, until time.Time, files ...*sparse) (err error) {
	keys := []string{layer.CheckpointKey(d)}
	for _, f := range files {
		keys = append(keys, layer.IndexKey(f.names.Chunks))
	}
	p, err := s.announce(ctx, keys...)
	if err != nil {
		return err
	}
	defer func() { p.release(ctx, err == nil) }()
	dir, err := os.MkdirTemp(s.path("tmp"), "checkpoint-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, f := range files {
		if err := s.pushSparse(ctx, p, dir, f); err != nil {
			return err
		}
	}
	if err := s.put(ctx, layer.CheckpointKey(d), bytes.NewReader(manifest)); err != nil {
		return err
	}
	note, err := json.Marshal(keeping{until.UTC()})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(s.path(checkpointDir), 0o700); err != nil {
		return err
	}
	return s.writeFile(filepath.Join(checkpointDir, d.Hex()), note, true)
}

// pushSparse stores what of a file is no hole, and then where it is. Nothing is shared with what
// others have stored, and no hints are left: what was in a memory is nobody else's to find.
func (s *Store) pushSparse(ctx context.Context, pin *pin, dir string, f *sparse) error {
	key := layer.IndexKey(f.names.Chunks)
	if _, err := s.opts.Blobs.Stat(ctx, key); err == nil || !errors.Is(err, dsec.NotFound.Err()) {
		return err
	}
	p, err := newPacker(dir, nil, func(name layer.Digest, pack io.Reader) error { return s.put(ctx, layer.PackKey(name), pack) })
	if err != nil {
		return err
	}
	defer p.close()
	data, err := p.pack(layer.Index{Chunks: append([]layer.Chunk(nil), f.data.Chunks...)}, f.read(ctx))
	if err != nil {
		return err
	}
	ix := f.whole(data)
	b, err := ix.Encode()
	if err != nil {
		return err
	}
	if err := pin.add(ctx, packKeys(ix)...); err != nil { // own ones that were there may have gone until now
		return err
	}
	if err := s.present(ctx, packKeys(ix)); err != nil {
		if errors.Is(err, dsec.NotFound.Err()) {
			err = &collectedError{err}
		}
		return err
	}
	return s.put(ctx, key, bytes.NewReader(b))
}

// FindCheckpoint implements layer.Checkpoints.
func (s *Store) FindCheckpoint(ctx context.Context, project string, d layer.Digest) (layer.Checkpoint, error) {
	const op = "find checkpoint"
	if _, err := layer.ParseDigest(string(d)); err != nil {
		return layer.Checkpoint{}, err
	}
	if s.opts.Blobs == nil {
		return layer.Checkpoint{}, dsec.Errorf(dsec.Unsupported, op, string(d), "there is no object storage")
	}
	b, err := blob.ReadAll(ctx, s.opts.Blobs, layer.CheckpointKey(d), layer.MaxCheckpoint)
	if errors.Is(err, dsec.NotFound.Err()) {
		return layer.Checkpoint{}, noCheckpoint(d)
	}
	if err != nil {
		return layer.Checkpoint{}, err
	}
	c, err := layer.DecodeCheckpoint(b, d)
	if err == nil && c.Project != project {
		err = noCheckpoint(d)
	}
	return c, err
}

// noCheckpoint is said of one that is not there, and of another project's: nobody can tell which.
func noCheckpoint(d layer.Digest) error {
	return dsec.Errorf(dsec.NotFound, "find checkpoint", string(d), "there is none of that digest in this project")
}

// FetchCheckpoint implements layer.Checkpoints.
func (s *Store) FetchCheckpoint(ctx context.Context, d layer.Digest, c layer.Checkpoint, f layer.MomentFiles) (err error) {
	const op = "fetch checkpoint"
	if s.opts.Blobs == nil {
		return dsec.Errorf(dsec.Unsupported, op, string(d), "there is no object storage")
	}
	p, err := s.announce(ctx, layer.CheckpointKey(d))
	if err != nil {
		return err
	}
	defer p.release(ctx, false) // when it is here, nothing of it is needed there
	for _, part := range []struct {
		of layer.Chunked
		to *os.File
	}{{c.Disk, f.Disk}, {c.Memory, f.Memory}} {
		if err := s.fetchSparse(ctx, d, part.of, part.to); err != nil {
			return dsec.E(fault.Class(err, dsec.ClassOf(err)), op, string(d), err)
		}
	}
	return nil
}

// fetchSparse writes what is no hole to a file that is nothing but one.
func (s *Store) fetchSparse(ctx context.Context, d layer.Digest, of layer.Chunked, to *os.File) error {
	raw, err := blob.ReadAll(ctx, s.opts.Blobs, layer.IndexKey(of.Chunks), layer.MaxIndex)
	if err != nil {
		return err
	}
	ix, err := layer.DecodeIndex(raw, of)
	if err != nil {
		return err
	}
	if err := to.Truncate(of.Size); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "checkpoint-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	l, err := s.openSparse(dir, d, ix, to)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // what is on its way is given up, too
	defer stop()
	if err = l.Fill(ctx); err == nil {
		err = to.Sync() // a disk without room may say so only now
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return errors.Join(err, l.Close())
}

// openSparse has chunks written to a file, which stays the caller's.
func (s *Store) openSparse(dir string, d layer.Digest, ix layer.Index, to *os.File) (*ondemand.Layer, error) {
	name := filepath.Join(dir, layer.PresentFile)
	if err := layer.CreatePresence(name, len(ix.Chunks)); err != nil {
		return nil, err
	}
	note, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	present, err := layer.OpenPresence(note, len(ix.Chunks))
	if err != nil {
		return nil, err
	}
	data, err := linux.Duplicate(to)
	if err != nil {
		return nil, errors.Join(err, present.Close())
	}
	l, err := ondemand.Open(ondemand.Parts{Digest: d, Index: ix, Data: data, Present: present}, ondemand.Options{Blobs: s.opts.Blobs, Lanes: s.lanes})
	if err != nil {
		return nil, errors.Join(err, present.Close(), data.Close())
	}
	return l, nil
}

// keptCheckpoints are the keys of those that this store keeps.
func (s *Store) keptCheckpoints() ([]string, error) {
	all, err := s.here(checkpointDir)
	if err != nil {
		return nil, err
	}
	keys := make([]string, 0, len(all))
	for _, d := range all {
		keys = append(keys, layer.CheckpointKey(d))
	}
	return keys, nil
}

// expireCheckpoints ends the keeping of those whose time is over.
func (s *Store) expireCheckpoints(now time.Time) error {
	const op = "expire checkpoint"
	all, err := s.here(checkpointDir)
	if err != nil {
		return err
	}
	for _, d := range all {
		b, err := os.ReadFile(s.path(checkpointDir, d.Hex()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return diskError(op, string(d), err)
		}
		var k keeping
		if err := json.Unmarshal(b, &k); err != nil {
			s.opts.Log.Warn("nobody knows how long a checkpoint is kept: it stays", "checkpoint", d, "err", err)
			continue
		}
		if now.Before(k.Until) {
			continue
		}
		if err := os.Remove(s.path(checkpointDir, d.Hex())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return diskError(op, string(d), err)
		}
	}
	return nil
}
