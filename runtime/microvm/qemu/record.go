package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// recordFormat is the version of docs/formats/vmrecord.md.
const recordFormat = 1

// record is what the next owner must know of a machine.
type record struct {
	Format   int      `json:"format"`
	Name     string   `json:"name"`
	UID      uint32   `json:"uid"`
	Identity identity `json:"identity"`
}

const (
	recordDir  = "machines"
	recordTail = ".json"
	recordTemp = ".new-"
	maxRecord  = 64 << 10
)

// ownerWait is how long a lock is waited for that an owner held who has just died.
const ownerWait = 2 * time.Second

func (r record) encode() []byte {
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		panic(err) // strings and numbers
	}
	return append(text, '\n')
}

func parseRecord(text []byte) (record, error) {
	const op, object = "parse", "record of a virtual machine"
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(text, &version); err != nil {
		return record{}, dsec.E(dsec.Corrupt, op, object, err)
	}
	if version.Format != recordFormat {
		return record{}, dsec.Errorf(dsec.Unsupported, op, object, "format %d, this version of dsec knows %d", version.Format, recordFormat)
	}
	var r record
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		return record{}, dsec.E(dsec.Corrupt, op, object, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return record{}, dsec.Errorf(dsec.Corrupt, op, object, "something follows it")
	}
	s := r.Identity.shape()
	s.Kernel.Path, s.Initramfs.Path = "-", "-"
	if err := errors.Join(s.Check(), vmm.CheckName(r.Name)); err != nil {
		return record{}, dsec.E(dsec.Corrupt, op, object, err)
	}
	for _, sum := range []string{r.Identity.Line, r.Identity.Kernel, r.Identity.Initramfs} {
		if !keyForm.MatchString(sum) {
			return record{}, dsec.Errorf(dsec.Corrupt, op, object, "%s is no SHA-256", dsec.Quote(sum))
		}
	}
	return r, nil
}

// owned is the record of a machine that this process owns: it has its lock.
type owned struct {
	record
	path string
	f    *os.File
}

func (d *Driver) recordPath(name string) string {
	return filepath.Join(d.cfg.Dir, recordDir, name+recordTail)
}

// newRecord makes the record of a machine that is about to be started.
func (d *Driver) newRecord(r record) (_ *owned, err error) {
	const op = "record machine"
	dir := filepath.Join(d.cfg.Dir, recordDir)
	f, err := os.CreateTemp(dir, recordTemp)
	if err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), op, r.Name, cause(err))
	}
	// Under its own name it is locked and complete from the beginning.
	defer func() {
		_ = os.Remove(f.Name())
		if err != nil {
			_ = f.Close()
		}
	}()
	if err := linux.Flock(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, dsec.E(dsec.Internal, op, r.Name, err)
	}
	if _, err := f.Write(r.encode()); err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), op, r.Name, cause(err))
	}
	o := &owned{record: r, path: d.recordPath(r.Name), f: f}
	if err := os.Link(f.Name(), o.path); errors.Is(err, fs.ErrExist) {
		return nil, dsec.Errorf(dsec.AlreadyExists, "start", "virtual machine "+r.Name, "a machine has this name")
	} else if err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), op, r.Name, err)
	}
	return o, nil
}

// ownRecord takes the lock of a record whose owner has ended. Its content may be
// damaged: then the error is of parseRecord, and the lock is taken all the same.
func (d *Driver) ownRecord(ctx context.Context, name string) (*owned, error) {
	const op = "adopt"
	object := "virtual machine " + name
	ctx, cancel := context.WithTimeout(ctx, ownerWait)
	defer cancel()
	for {
		f, err := os.OpenFile(d.recordPath(name), os.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			return nil, dsec.E(fault.Class(err, dsec.Internal), op, object, cause(err))
		}
		if err = linux.Flock(f, unix.LOCK_EX|unix.LOCK_NB); err == nil && same(f, d.recordPath(name)) {
			text, err := io.ReadAll(io.LimitReader(f, maxRecord))
			if err == nil {
				o := &owned{path: d.recordPath(name), f: f}
				o.record, err = parseRecord(text)
				if err == nil && o.Name != name {
					err = dsec.Errorf(dsec.Corrupt, op, object, "its record is of %s", dsec.Quote(o.Name))
				}
				return o, err
			}
			_ = f.Close()
			return nil, dsec.E(dsec.Internal, op, object, cause(err))
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, dsec.E(dsec.Internal, op, object, err)
		}
		if within.Sleep(ctx, 10*time.Millisecond) != nil {
			return nil, dsec.Errorf(dsec.Conflict, op, object, "it has a living owner")
		}
	}
}

// same says whether a file still has its name.
func same(f *os.File, name string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Lstat(name)
	return err == nil && os.SameFile(a, b)
}

// release gives up the lock, and leaves the record to the next.
func (o *owned) release() { _ = o.f.Close() }

// remove is the last that is done for a machine: nothing else of it is left.
func (o *owned) remove() {
	if err := os.Remove(o.path); err != nil {
		slog.Warn("remove record of a virtual machine", "name", o.Name, "error", err)
	}
	_ = o.f.Close()
}

// Names lists the machines that have a name and were not ended, whoever owns them.
func (d *Driver) Names(context.Context) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(d.cfg.Dir, recordDir))
	if err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), "list", "virtual machines", cause(err))
	}
	names := []string{}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), recordTail); ok && vmm.CheckName(name) == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// reserve takes the users of all machines that there are, and removes what processes left
// that died while they made a record.
func (d *Driver) reserve(ctx context.Context) error {
	// Also of those whose records this version cannot read.
	plains, err := d.cfg.Keep.Hold.Plains(ctx, keptPrefix)
	if err != nil {
		return err
	}
	for _, p := range plains {
		d.users[p.Spec.UID] = true
	}
	dir := filepath.Join(d.cfg.Dir, recordDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "make directory", dir, cause(err))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return dsec.E(dsec.Internal, "list", "virtual machines", cause(err))
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), recordTemp) {
			f, err := os.Open(path)
			if err == nil && linux.Flock(f, unix.LOCK_EX|unix.LOCK_NB) == nil {
				_ = os.Remove(path)
			}
			closeAll(f)
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it was ended
		}
		r, err := parseRecord(text)
		if err != nil {
			slog.Warn("a record of a virtual machine cannot be read", "path", path, "error", err)
			continue
		}
		d.users[r.UID] = true
	}
	return nil
}
