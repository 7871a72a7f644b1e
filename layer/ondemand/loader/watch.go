package loader

import (
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
)

// Status of one layer.
type Status struct {
	Digest   layer.Digest  `json:"digest"`
	Whole    bool          `json:"whole"` // it was, before this loader began
	Here     int           `json:"here"`  // chunks
	Chunks   int           `json:"chunks"`
	Readers  int           `json:"readers"` // mounts of it
	Requests int64         `json:"requests"`
	Fetched  int64         `json:"fetched"` // bytes, compressed
	Plain    int64         `json:"plain"`   // bytes that they became
	Stalls   int64         `json:"stalls"`  // reads that waited
	Stalled  time.Duration `json:"stalled"` // how long, added
	Failures int64         `json:"failures"`
	Last     string        `json:"last,omitempty"` // the last failure
}

func (s *Server) status() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Status
	for d, x := range s.layers {
		if x.l == nil {
			out = append(out, Status{Digest: d, Whole: true, Readers: len(x.sessions)})
			continue
		}
		st := x.l.Stats()
		here, of := x.l.Here()
		one := Status{Digest: d, Here: here, Chunks: of, Readers: len(x.sessions), Requests: st.Requests, Fetched: st.Fetched, Plain: st.Plain,
			Stalls: st.Stalls, Stalled: st.Stalled, Failures: st.Failures}
		if st.Last != nil {
			one.Last = st.Last.Error()
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b Status) int { return strings.Compare(string(a.Digest), string(b.Digest)) })
	return out
}

// syncEvery is how much of what was fetched a power failure may cost.
const syncEvery = 5 * time.Second

// watch makes durable what came.
func (s *Server) watch() {
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	here := map[layer.Digest]int{}
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		s.room.Expire()
		for d, l := range s.all() {
			if n, _ := l.Here(); n != here[d] {
				here[d] = n
				s.sync(l)
			}
		}
	}
}

func (s *Server) all() map[layer.Digest]*ondemand.Layer {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[layer.Digest]*ondemand.Layer{}
	for d, x := range s.layers {
		if x.l != nil {
			out[d] = x.l
		}
	}
	return out
}

func (s *Server) sync(l *ondemand.Layer) bool {
	err := l.Sync()
	if err != nil && dsec.ClassOf(err) != dsec.Canceled {
		s.opts.Log.Error("sync layer", "layer", l.Digest(), "err", err)
	}
	return err == nil
}

// awaitWhole tells when all data of a layer have come, after making that durable.
func (s *Server) awaitWhole(l *ondemand.Layer) {
	select {
	case <-l.Whole():
		if s.sync(l) {
			s.tell(frame{Op: opDone, Digest: l.Digest()})
		}
	case <-l.Closed():
	case <-s.ctx.Done():
	}
}
