package audit

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// Config of a Store.
type Config struct {
	Dir   string                 // made if missing; a directory for each sandbox
	Sizes Sizes                  // zero: 2 lanes of 4 segments of 2 MiB
	Count func(dsec.AuditRecord) // told of each that is written; nil: nobody
	Clock func() time.Time       // nil: time.Now
	Log   *slog.Logger           // nil: discarded
}

// Store has the logs of the sandboxes of a node.
type Store struct {
	cfg  Config
	stop context.CancelFunc
	done sync.WaitGroup

	held *held

	mu   sync.Mutex
	logs map[dsec.SandboxID]*log
}

// Open takes over what an earlier process wrote.
func Open(c Config) (*Store, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, dsec.E(dsec.Internal, "open audit logs", c.Dir, err)
	}
	if c.Sizes == (Sizes{}) {
		c.Sizes = defaultSizes
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Count == nil {
		c.Count = func(dsec.AuditRecord) {}
	}
	h, err := openHeld(filepath.Join(c.Dir, heldName))
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open audit logs", c.Dir, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{cfg: c, stop: cancel, held: h, logs: map[dsec.SandboxID]*log{}}
	if err := h.left(s.found); err != nil {
		cancel()
		return nil, dsec.E(dsec.Internal, "open audit logs", c.Dir, errors.Join(err, h.close()))
	}
	s.done.Go(func() { s.flush(ctx) })
	return s, nil
}

// heldName is of the file of what is held back; no sandbox has a name like that.
const heldName = "held"

// found takes over what an earlier process held back, unless the sandbox is no more.
func (s *Store) found(id dsec.SandboxID, r dsec.AuditRecord) {
	if l, err := s.log(id); err == nil {
		if _, err := os.Stat(l.dir); err == nil {
			s.told(id)(l.appendAsIs(s.cfg.Clock(), r))
		}
	}
}

// Close writes what is held back.
func (s *Store) Close() error {
	s.stop()
	s.done.Wait()
	for id, l := range s.all() {
		s.told(id)(l.flush(s.cfg.Clock(), true))
	}
	return s.held.close()
}

// log returns that of a sandbox. An id that is none would be a path elsewhere.
func (s *Store) log(id dsec.SandboxID) (*log, error) {
	if _, _, err := dsec.ParseSandboxID(string(id)); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.logs[id]
	if l == nil {
		l = newLog(filepath.Join(s.cfg.Dir, string(id)), s.cfg.Sizes, folder{id: id, held: s.held})
		s.logs[id] = l
	}
	return l, nil
}

func (s *Store) all() map[dsec.SandboxID]*log {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := make(map[dsec.SandboxID]*log, len(s.logs))
	for id, l := range s.logs {
		m[id] = l
	}
	return m
}

// Append adds records to the log of a sandbox; Seq, and what else is zero of Time and
// Phase, it fills in. What cannot be written is counted, and told by the next that can.
func (s *Store) Append(id dsec.SandboxID, records ...dsec.AuditRecord) {
	l, err := s.log(id)
	if err != nil {
		s.cfg.Log.Error("audit record of no sandbox", "sandbox", id, "err", err)
		return
	}
	s.told(id)(l.append(s.cfg.Clock(), records))
}

func (s *Store) told(id dsec.SandboxID) func([]dsec.AuditRecord, error) {
	return func(written []dsec.AuditRecord, err error) {
		if err != nil {
			s.cfg.Log.Error("audit records not written", "sandbox", id, "err", err)
		}
		for _, r := range written {
			s.cfg.Count(r)
		}
	}
}

// flush writes what is held back when its time has come.
func (s *Store) flush(ctx context.Context) {
	tick := time.NewTicker(foldWithin)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := s.cfg.Clock()
		for id, l := range s.all() {
			if l.waiting() {
				s.told(id)(l.flush(now, false))
			}
		}
	}
}

func (l *log) waiting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.folds.pending()
}

// End writes what is held back of a sandbox, which has ended.
func (s *Store) End(id dsec.SandboxID) {
	s.mu.Lock()
	l := s.logs[id]
	s.mu.Unlock()
	if l != nil {
		s.told(id)(l.flush(s.cfg.Clock(), true))
	}
}

// Read returns a cursor that stands behind the record of that number. A sandbox of
// which nothing was ever told has an empty log.
func (s *Store) Read(id dsec.SandboxID, since uint64) (*Cursor, error) {
	l, err := s.log(id)
	if err != nil {
		return nil, err
	}
	return &Cursor{l: l, since: since}, nil
}

// Remove forgets all there is of a sandbox.
func (s *Store) Remove(id dsec.SandboxID) error {
	l, err := s.log(id)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = true
	l.folds.due(time.Time{}, true)
	if err := l.folds.written(); err != nil {
		s.cfg.Log.Error("held back audit records not forgotten", "sandbox", id, "err", err)
	}
	close(l.changed)
	l.changed = make(chan struct{})
	s.mu.Lock()
	delete(s.logs, id)
	s.mu.Unlock()
	if err := os.RemoveAll(l.dir); err != nil {
		return dsec.E(dsec.Internal, "remove audit log", string(id), err)
	}
	return nil
}

// Known lists the sandboxes that have a log.
func (s *Store) Known() ([]dsec.SandboxID, error) {
	entries, err := os.ReadDir(s.cfg.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, dsec.E(dsec.Internal, "list audit logs", s.cfg.Dir, err)
	}
	var list []dsec.SandboxID
	for _, e := range entries {
		if id, _, err := dsec.ParseSandboxID(e.Name()); err == nil {
			list = append(list, id)
		}
	}
	return list, nil
}
