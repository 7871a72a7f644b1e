package loader

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
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

// counts fills an answer with what the whole loader counts.
func (s *Server) counts(answer *frame) (err error) {
	uncached := s.room.Uncached()
	answer.PID, answer.Uncached = os.Getpid(), &uncached
	if s.opts.BlobStats != nil {
		answer.Blobs, err = json.Marshal(s.opts.BlobStats())
	}
	return err
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
			one.Last = cut(st.Last.Error())
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b Status) int { return strings.Compare(string(a.Digest), string(b.Digest)) })
	return out
}

// syncEvery is how much of what was fetched a power failure may cost.
const syncEvery = 5 * time.Second

// syncAgain is how long a layer that is whole waits after it could not be synced.
const syncAgain = time.Second

// watch makes durable what came.
func (s *Server) watch() {
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		s.room.Expire()
		for _, x := range s.incomplete() {
			now, plain := time.Now(), x.l.Stats().Plain
			s.mu.Lock()
			same := x.landed == plain
			if same { // and all of it is on the disk
				x.synced = now
			}
			s.mu.Unlock()
			if !same {
				s.sync(x)
			}
		}
	}
}

func (s *Server) incomplete() (out []*served) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.layers {
		if x.l != nil {
			out = append(out, x)
		}
	}
	return out
}

// unsynced is the number of bytes that have landed of a layer of which it is not
// known that they are on the disk.
const unsynced = -1

// sync makes durable what has landed of a layer. What could not be written to the
// disk the kernel has forgotten, it may be a while ago, and shows something else in
// its place: whoever has read since all was well may have been given that.
func (s *Server) sync(x *served) bool {
	x.syncing.Lock() // or one that began before a failure could say that all was well
	defer x.syncing.Unlock()
	now, plain := time.Now(), int64(0)
	if x.l != nil {
		plain = x.l.Stats().Plain
	}
	err := x.data.Sync()
	s.mu.Lock()
	since := x.synced
	if err == nil {
		x.synced, x.landed = now, plain
	} else {
		x.landed = unsynced
	}
	s.mu.Unlock()
	if err != nil && dsec.ClassOf(err) != dsec.Canceled {
		s.opts.Log.Error("sync layer", "layer", x.digest, "err", err)
		s.raise(x, "", since, dsec.E(dsec.Internal, "keep what was read of layer", string(x.digest), err))
	}
	return err == nil
}

// awaitWhole tells when all data of a layer have come, after making that durable.
func (s *Server) awaitWhole(x *served) {
	for {
		select {
		case <-x.l.Whole():
			if !s.sync(x) {
				break
			}
			if x.l.Complete() { // nobody found meanwhile that it is not
				s.tell(frame{Op: opDone, Digest: x.digest})
				return
			}
		case <-x.l.Closed():
			return
		case <-s.ctx.Done():
			return
		}
		select { // not as fast as the disk can refuse
		case <-time.After(syncAgain):
		case <-x.l.Closed():
			return
		case <-s.ctx.Done():
			return
		}
	}
}
