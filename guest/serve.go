package guest

import (
	"context"
	"encoding/json"
	"io"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
)

// Server is what an agent answers with.
type Server interface {
	// Greet says who answers.
	Greet() Hello
	// Handle serves one stream, which is closed when it returns. ctx ends with the
	// session.
	Handle(ctx context.Context, s *Stream)
}

// Serve answers hosts on a channel, one after the other, until reading from it
// errs; then it ends and waits for what it has begun. What it writes meanwhile
// must err, too.
func Serve(ctx context.Context, channel io.ReadWriter, with Server) error {
	v := &service{ctx: ctx, wire: newWire(channel), with: with}
	defer v.all.Wait()
	defer v.drop()
	sc := newScanner(channel)
	for {
		p, err := sc.next()
		if err != nil {
			return dsec.E(dsec.Unavailable, "read from host", "", err)
		}
		switch {
		case p.kind == kindHello:
			v.hello(p)
		case v.cur != nil && p.session == v.cur.session:
			if err := v.cur.take(p); err != nil {
				v.cur.fail(err)
				v.drop()
			}
		}
	}
}

type service struct {
	ctx  context.Context
	wire *wire
	with Server
	cur  *mux // nil between sessions
	end  context.CancelFunc
	all  sync.WaitGroup
}

// drop ends the session there is.
func (v *service) drop() {
	if v.cur != nil {
		v.cur.fail(errReplaced)
		v.end()
	}
	v.cur = nil
}

func (v *service) hello(p packet) {
	if p.number != 0 || p.stream != 0 {
		return
	}
	if m := v.cur; m != nil && m.session == p.session {
		if m.received == 0 { // it was told again because our answer took its time
			v.all.Go(func() { v.greet(m, nil) })
		}
		return
	}
	var h Hello
	if json.Unmarshal(p.payload, &h) != nil {
		return
	}
	v.drop()
	var refused *Fault
	if !slices.Contains(h.Versions, Version) {
		refused = NewFault(dsec.Errorf(dsec.Unsupported, "greet guest", "", "it speaks version %d, the host %v", Version, h.Versions))
	}
	ctx, cancel := context.WithCancel(v.ctx)
	var m *mux
	m = newMux(v.wire, p.session, func(s *Stream) {
		v.all.Go(func() {
			defer s.Close() //nolint:errcheck // it never errs
			v.with.Handle(ctx, s)
		})
	})
	v.cur, v.end = m, cancel
	v.all.Go(func() {
		v.greet(m, refused)
		if refused == nil {
			m.write()
		}
	})
}

func (v *service) greet(m *mux, refused *Fault) {
	h := v.with.Greet()
	h.Version, h.Error = Version, refused
	b, err := json.Marshal(h)
	if err == nil {
		err = v.wire.hello(m.session, b)
	}
	if err != nil {
		m.fail(err)
	}
}
