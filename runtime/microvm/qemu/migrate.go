package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/within"
)

// How often QEMU is asked how far it is, and the limit when the context has none.
const (
	pollTime    = 2 * time.Millisecond
	migrateTime = 2 * time.Minute
)

type capability struct {
	Capability string `json:"capability"`
	State      bool   `json:"state"`
}

// shareMemory says that memory which is a file is not a part of the state.
func (m *machine) shareMemory(ctx context.Context, on bool) error {
	return m.call(ctx, "migrate-set-capabilities", map[string]any{"capabilities": []capability{{"x-ignore-shared", on}}}, nil)
}

// give hands QEMU a file by a name.
func (m *machine) give(ctx context.Context, name string, f *os.File) error {
	err := m.mon.callWith(ctx, "getfd", map[string]any{"fdname": name}, nil, f)
	if err != nil {
		select {
		case <-m.mon.done:
			return m.gone(ctx, "getfd", err)
		default:
		}
	}
	return err
}

// save writes the state of a machine that stands still to a file, at most limit bytes.
func (m *machine) save(ctx context.Context, to *os.File, limit int64) (content, error) {
	const op = "save state"
	ctx, cancel := context.WithTimeout(ctx, migrateTime)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		return content{}, dsec.E(dsec.Internal, op, "virtual machine", err)
	}
	defer func() { _ = r.Close() }()
	err = m.give(ctx, "state", w)
	_ = w.Close() // QEMU has it
	if err != nil {
		return content{}, err
	}
	type result struct {
		content content
		err     error
	}
	written := make(chan result, 1)
	go func() {
		h := sha256.New()
		n, err := io.Copy(io.MultiWriter(to, h), io.LimitReader(r, limit+1))
		if err == nil && n > limit {
			err = dsec.Errorf(dsec.Internal, op, to.Name(), "it has more than %d bytes", limit)
		}
		_ = r.Close() // QEMU's next write fails, so that it does not wait for us
		written <- result{content{n, hex.EncodeToString(h.Sum(nil))}, err}
	}()
	// Without a limit: the machine stands still until it is done.
	err = m.call(ctx, "migrate-set-parameters", map[string]any{"max-bandwidth": int64(1) << 40}, nil)
	if err == nil {
		err = m.call(ctx, "migrate", map[string]any{"uri": "fd:state"}, nil)
	}
	if err == nil {
		err = m.saved(ctx)
	}
	if err != nil {
		_ = r.SetReadDeadline(time.Now()) // QEMU may keep its end
	}
	got := <-written
	if err != nil || got.err != nil {
		m.unsave(ctx)
	}
	switch {
	case got.err != nil && !(err != nil && errors.Is(got.err, os.ErrDeadlineExceeded)):
		return content{}, dsec.E(fault.Class(got.err, dsec.Internal), "write", to.Name(), cause(got.err))
	case err != nil:
		return content{}, err
	}
	return got.content, nil
}

// unsave waits until a migration that nobody reads has ended: until then the guest must
// not go on. A QEMU that does not come to that end is broken, and killed.
func (m *machine) unsave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	_ = m.call(ctx, "closefd", map[string]any{"fdname": "state"}, nil) // if it was not taken
	_ = m.call(ctx, "migrate_cancel", nil, nil)                        // if there is one
	for {
		var s struct {
			Status string `json:"status"`
		}
		err := m.call(ctx, "query-migrate", nil, &s)
		if err == nil && !slices.Contains([]string{"setup", "active", "device", "cancelling", "pre-switchover"}, s.Status) {
			return
		}
		if err == nil {
			err = within.Sleep(ctx, pollTime)
		}
		if err != nil {
			m.proc.Kill()
			return
		}
	}
}

// saved waits for the end of a migration.
func (m *machine) saved(ctx context.Context) error {
	for {
		var s struct {
			Status string `json:"status"`
			Desc   string `json:"error-desc"`
		}
		if err := m.call(ctx, "query-migrate", nil, &s); err != nil {
			return err
		}
		switch s.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return dsec.Errorf(dsec.Internal, "save state", "virtual machine", "QEMU: %s %s", s.Status, dsec.Quote(s.Desc))
		}
		if err := within.Sleep(ctx, pollTime); err != nil {
			return dsec.E(dsec.ClassOf(err), "save state", "virtual machine", err)
		}
	}
}

// load gives a machine that waits for a state one, and returns when it stands where
// that was taken. A QEMU that does not like it ends; that is Corrupt. The file is read from
// where it stands. It must not be a pipe: a QEMU that has to wait for the next piece goes on with what its
// devices have to do, and some have only half of what they were by then (7.2, a virtio-serial in the middle of a write).
// From 9.1 on QEMU wants a file to be called one, and says so; one after 10 may insist.
func (m *machine) load(ctx context.Context, state *os.File) error {
	const op = "load state"
	ctx, cancel := context.WithTimeout(ctx, migrateTime)
	defer cancel()
	err := m.give(ctx, "state", state)
	if err == nil {
		err = m.call(ctx, "migrate-incoming", map[string]any{"uri": "fd:state"}, nil)
	}
	for err == nil {
		var status string
		if status, err = m.status(ctx); err == nil && status != "inmigrate" {
			break
		}
		if err != nil && dsec.ClassOf(err) == dsec.Timeout && ctx.Err() == nil {
			err = nil // while it reads, it answers nobody
		}
		if err == nil {
			if err = within.Sleep(ctx, pollTime); err != nil {
				err = dsec.E(dsec.ClassOf(err), op, "virtual machine", err)
			}
		}
	}
	if err != nil && m.refused() {
		return dsec.E(dsec.Corrupt, op, "virtual machine", m.Err())
	}
	return err
}

// refused says that QEMU has ended by its own decision.
func (m *machine) refused() bool {
	select {
	case <-m.done:
	default:
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exited
}
