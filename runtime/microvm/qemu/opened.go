package qemu

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/linux"
)

// opened is a template that this process clones, or has cloned.
type opened struct {
	used time.Time // this and the next under the driver's lock
	open bool      // it is in memory

	mu       sync.Mutex
	manifest manifest
	ram      *os.File // sealed; nil: not in memory
	state    []byte
}

// close is called with its lock held.
func (d *Driver) close(o *opened) {
	closeAll(o.ram)
	o.ram, o.state = nil, nil
	d.mu.Lock()
	defer d.mu.Unlock()
	o.open = false
}

// load brings a template into memory, unless it is there.
func (d *Driver) load(ctx context.Context, key string) error {
	_, _, ram, err := d.open(ctx, key)
	closeAll(ram)
	return err
}

// open is load, and returns what a clone is made of. The memory is the caller's to close.
func (d *Driver) open(ctx context.Context, key string) (man manifest, state []byte, ram *os.File, err error) {
	const op = "open template"
	if !keyForm.MatchString(key) {
		return man, nil, nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(key), "it is no key")
	}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return man, nil, nil, dsec.E(dsec.Internal, op, key, os.ErrClosed)
	}
	o := d.templates[key]
	if o == nil {
		o = &opened{}
		d.templates[key] = o
	}
	o.used = time.Now()
	d.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ram == nil {
		if err := o.read(ctx, d.cfg.Dir, key); err != nil {
			return man, nil, nil, dsec.E(dsec.ClassOf(err), op, key, err)
		}
		d.closeOldest(o)
	}
	d.touch(key)
	ram, err = linux.Duplicate(o.ram)
	if err != nil {
		return man, nil, nil, dsec.E(dsec.Internal, op, key, err)
	}
	return o.manifest, o.state, ram, nil
}

// closeOldest gives back the memory of templates that were not used for the longest, beyond what is to be
// kept, when one more is there. Clones of them go on. One that somebody has in hand is used.
func (d *Driver) closeOldest(more *opened) {
	d.mu.Lock()
	more.open = true
	all := make([]*opened, 0, len(d.templates))
	for _, o := range d.templates {
		if o.open {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b *opened) int { return b.used.Compare(a.used) })
	d.mu.Unlock()
	for _, o := range all[min(d.cfg.InMemory, len(all)):] {
		if o.mu.TryLock() {
			d.close(o)
			o.mu.Unlock()
		}
	}
}

// touch notes that a template is used. One that is dropped because this did not work is built again.
func (d *Driver) touch(key string) {
	now := time.Now()
	_ = os.Chtimes(filepath.Join(d.cfg.Dir, key), now, now)
}

// dropOldest removes the templates that were not used for the longest, beyond what is to be kept
// and but for the one of a key; only under the lock. What cannot be removed stays.
func (d *Driver) dropOldest(but string) {
	entries, err := os.ReadDir(d.cfg.Dir)
	if err != nil {
		slog.Warn("old templates of virtual machines stay", "dir", d.cfg.Dir, "error", err)
	}
	type old struct {
		key  string
		used time.Time
	}
	var all []old
	for _, e := range entries {
		if info, err := e.Info(); err == nil && keyForm.MatchString(e.Name()) && e.Name() != but {
			all = append(all, old{e.Name(), info.ModTime()})
		}
	}
	slices.SortFunc(all, func(a, b old) int { return cmp.Or(b.used.Compare(a.used), cmp.Compare(a.key, b.key)) })
	for _, t := range all[min(d.cfg.OnDisk-1, len(all)):] {
		if err := d.remove(t.key); err != nil {
			slog.Warn("an old template of virtual machines stays", "error", err)
		}
	}
}

// remove removes a template, all at once for whoever reads it; only under the lock.
func (d *Driver) remove(key string) error {
	old, gone := filepath.Join(d.cfg.Dir, key), filepath.Join(d.cfg.Dir, temporary+key)
	err := os.Rename(old, gone)
	if err == nil {
		err = os.RemoveAll(gone) // else the next who builds does
	}
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "remove template", key, cause(err))
	}
	return nil
}

// read reads a template into memory.
func (o *opened) read(ctx context.Context, above, key string) error {
	dir := filepath.Join(above, key)
	man, err := readManifest(dir, kindTemplate)
	if err != nil {
		return err
	}
	if got := man.Identity.key(); got != key {
		return dsec.Errorf(dsec.Corrupt, "read manifest", dir, "it is that of %s", got)
	}
	state, err := readState(dir, man.State)
	if err != nil {
		return err
	}
	ram, err := loadRAM(ctx, filepath.Join(dir, "ram"), *man.RAM)
	if err != nil {
		return err
	}
	o.manifest, o.state, o.ram = man, state, ram
	return nil
}

func readState(dir string, want content) ([]byte, error) {
	f, err := openState(dir, want)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	state := make([]byte, want.Size)
	if _, err := io.ReadFull(f, state); err != nil {
		return nil, dsec.E(readClass(err), "read", f.Name(), cause(err))
	}
	if sum := sha256.Sum256(state); hex.EncodeToString(sum[:]) != want.SHA256 {
		return nil, dsec.Errorf(dsec.Corrupt, "read", f.Name(), "its digest is not that of its manifest")
	}
	return state, nil
}

func openState(dir string, want content) (*os.File, error) {
	name := filepath.Join(dir, "state")
	f, err := openSized(name, os.O_RDONLY, want.Size)
	if err != nil { // the manifest is there, so the rest has to be
		return nil, dsec.E(dsec.Corrupt, "read", name, err)
	}
	return f, nil
}

// loadRAM reads memory into a sealed file.
func loadRAM(ctx context.Context, name string, want content) (*os.File, error) {
	f, err := openSized(name, os.O_RDONLY, want.Size)
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, "read", name, err)
	}
	defer func() { _ = f.Close() }()
	ram, err := zeros(want.Size, false)
	if err != nil {
		return nil, err
	}
	sum, err := copyRAM(ctx, ram, f, want.Size)
	if err == nil && sum != want.SHA256 {
		err = dsec.Errorf(dsec.Corrupt, "read", name, "its digest is not that of its manifest")
	}
	if err == nil {
		err = seal(ram, writeSeals)
	}
	if err != nil {
		_ = ram.Close()
		return nil, err
	}
	return ram, nil
}
