package store

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// EnsureOptions say how to make an image known.
type EnsureOptions struct {
	// MaxAge is how old the last look at what the reference means may be; 0:
	// look now; below 0: any look will do.
	MaxAge time.Duration
	// Image is how to fetch and convert; credentials that are nil are looked up.
	Image image.Options
}

// Progress is layer.Progress.
type Progress = layer.Progress

// progressEvery is how often a caller is told.
const progressEvery = 200 * time.Millisecond

// making is an image on its way. Any number of callers wait for it.
type making struct {
	turn   chan struct{}
	done   chan struct{} // closed when info and err are there
	cancel context.CancelFunc
	info   layer.Info
	err    error

	mu      sync.Mutex
	callers int
	p       Progress
	waits   int       // layers that other machines are at
	fetched int64     // bytes that came
	since   time.Time // of the first of them
}

// Ensure makes the image of a reference known: a stack with a layer for each of
// its OCI layers, whole on this machine. A tag of that name wins, and means
// what it means. progress, if not nil, is told what happens.
//
// Each OCI layer is fetched and converted once by all machines that share the
// blob store, whatever image it is in; all callers share the work; what a
// killed program had finished or fetched counts.
func (s *Store) Ensure(ctx context.Context, source string, o EnsureOptions, progress func(Progress)) (layer.Info, error) {
	if info, ok, err := s.means(source, o); ok || err != nil {
		return info, err
	}
	name, err := image.ReferenceName(source, o.Image)
	if err != nil {
		return layer.Info{}, err
	}
	m := s.join(name, source, o)
	defer s.leave(m)
	t := time.NewTicker(progressEvery)
	defer t.Stop()
	for {
		if progress != nil {
			progress(s.progress(m))
		}
		select {
		case <-m.done:
			return m.info, m.err
		case <-ctx.Done():
			return layer.Info{}, dsec.E(dsec.ClassOf(ctx.Err()), "ensure image", name, ctx.Err())
		case <-t.C:
		}
	}
}

// means finds what a name is known to mean, if that is recent enough.
func (s *Store) means(source string, o EnsureOptions) (layer.Info, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.tagsLocked()
	if err != nil {
		return layer.Info{}, false, err
	}
	d := layer.Digest("")
	if t, ok := all[source]; ok && s.sees(t.project) {
		d = t.digest
	} else if r, ok := s.refLocked(source, o.Image); ok && (o.MaxAge < 0 || time.Since(r.At) < o.MaxAge || image.IsPinned(source)) && s.hereLocked(r.Stack) {
		d = r.Stack
	}
	if d == "" {
		return layer.Info{}, false, nil
	}
	e, err := s.entryLocked(d, all, nil)
	return e.Info, err == nil, err
}

// hereLocked tells whether a stack and all its layers are here.
func (s *Store) hereLocked(d layer.Digest) bool {
	st, ok := s.stacks[d]
	for _, p := range st.Layers {
		if _, err := s.localLocked(p.Digest); err != nil {
			return false
		}
	}
	return ok
}

// join finds the work for an image, or begins it.
func (s *Store) join(name, source string, o EnsureOptions) *making {
	key := strings.Join([]string{name, o.Image.Platform, map[bool]string{true: "insecure"}[o.Image.Insecure]}, "\n")
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.makings[key]
	if m != nil {
		m.mu.Lock()
		gone := m.callers == 0 // it is being cancelled
		if !gone {
			m.callers++
		}
		m.mu.Unlock()
		if !gone {
			return m
		}
	}
	ctx, cancel := context.WithCancel(s.ctx)
	m = &making{turn: make(chan struct{}), done: make(chan struct{}), cancel: cancel, callers: 1, p: Progress{Phase: "queue"}}
	s.makings[key] = m
	s.wg.Go(func() {
		m.info, m.err = s.makeImage(ctx, m, name, source, o)
		cancel()
		s.mu.Lock()
		if s.makings[key] == m {
			delete(s.makings, key)
		}
		s.mu.Unlock()
		close(m.done)
	})
	return m
}

// leave ends the work when nobody waits for it any more.
func (s *Store) leave(m *making) {
	m.mu.Lock()
	m.callers--
	last := m.callers == 0
	m.mu.Unlock()
	if last {
		m.cancel()
	}
}

func (s *Store) progress(m *making) Progress {
	q := s.queue.position(m.turn)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.p
	p.Queue = q
	if p.Phase == "convert" && m.waits > 0 {
		p.Phase = "wait"
	}
	if took := time.Since(m.since); m.fetched > 0 && p.Done < p.Total && took > 0 {
		p.Left = time.Duration(float64(took) * float64(p.Total-p.Done) / float64(m.fetched))
	}
	return p
}

func (m *making) phase(name string, total int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.p.Phase = name
	if total > 0 {
		m.p.Total, m.since = total, time.Now()
	}
}

// came counts bytes of layers: fetched, or found to be here.
func (m *making) came(n int64, fetched bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.p.Done = min(m.p.Done+n, m.p.Total)
	if fetched {
		m.fetched += n
	}
}

func (m *making) waiting(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waits += n
}

func (s *Store) makeImage(ctx context.Context, m *making, name, source string, o EnsureOptions) (layer.Info, error) {
	const op = "ensure image"
	if err := s.queue.enter(ctx, m.turn); err != nil {
		return layer.Info{}, diskError(op, name, err)
	}
	defer s.queue.leave()
	m.phase("resolve", 0)
	if o.Image.Credentials == nil {
		o.Image.Credentials = image.FindCredentials(source, o.Image)
	}
	remote, err := s.pull.Resolve(ctx, source, o.Image)
	if err != nil {
		return layer.Info{}, err
	}
	var total int64
	for _, b := range unique(remote.Layers) {
		total += b.Size
	}
	m.phase("convert", max(total, 1))
	st, err := s.convertImage(ctx, m, remote, o.Image)
	if err != nil {
		return layer.Info{}, diskError(op, name, err)
	}
	m.phase("stack", 0)
	info, err := s.View("").PutStack(ctx, st, remote.Name, "")
	if err == nil {
		err = s.setRef(name, o.Image.Platform, info.Digest)
	}
	if err != nil {
		return layer.Info{}, diskError(op, name, err)
	}
	return info, nil
}
