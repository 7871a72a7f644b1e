package store

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// claim says in the blob store who is at a piece of work that one machine shall
// do for all, docs/formats/stack.md.
type claim struct {
	Version int    `json:"version"`
	Owner   string `json:"owner"`
	Beat    int64  `json:"beat"`
}

const (
	claimVersion = 1
	maxClaim     = 4 << 10 // bytes
	beats        = 5       // in the time after which an owner is taken for dead
)

// claiming is a try to be the one.
type claiming struct {
	s    *Store
	key  string // without the turn
	seen string // the text of the highest turn, and
	when time.Time
}

func (s *Store) newClaim(key string) *claiming { return &claiming{s: s, key: "claims/" + key} }

func (c *claiming) turnKey(turn int64) string { return c.key + "/" + strconv.FormatInt(turn, 10) }

// try takes the work if nobody has it or who had it is dead: held is then how
// to let it go. nil: somebody else is at it.
func (c *claiming) try(ctx context.Context) (held *heldClaim, err error) {
	turn, text, err := c.highest(ctx)
	if err != nil {
		return nil, err
	}
	var there claim
	if turn > 0 && json.Unmarshal([]byte(text), &there) == nil && there.Owner == c.s.id && !c.s.working(c.key) {
		return c.hold(ctx, turn, true) // ours, from before this program was killed
	}
	if turn > 0 && text != c.seen {
		c.seen, c.when = text, time.Now()
		return nil, nil
	}
	if turn > 0 && time.Since(c.when) < c.s.opts.ClaimTTL {
		return nil, nil
	}
	return c.hold(ctx, turn+1, false)
}

// highest reads the turn that counts; 0 if there is none.
func (c *claiming) highest(ctx context.Context) (turn int64, text string, err error) {
	for info, err := range c.s.opts.Blobs.List(ctx, c.key+"/") {
		if err != nil {
			return 0, "", err
		}
		n, err := strconv.ParseInt(strings.TrimPrefix(info.Key, c.key+"/"), 10, 64)
		if err == nil && n > turn {
			turn = n
		}
	}
	if turn == 0 {
		return 0, "", nil
	}
	b, err := blob.ReadAll(ctx, c.s.opts.Blobs, c.turnKey(turn), maxClaim)
	if dsec.ClassOf(err) == dsec.NotFound { // just let go
		return 0, "", nil
	}
	return turn, string(b), err
}

// hold writes a turn; nil if another was quicker.
func (c *claiming) hold(ctx context.Context, turn int64, again bool) (*heldClaim, error) {
	h := &heldClaim{claiming: c, turn: turn}
	if err := h.write(ctx, !again); err != nil {
		if errors.Is(err, dsec.AlreadyExists.Err()) {
			return nil, nil
		}
		return nil, err
	}
	c.s.setWorking(c.key, true)
	bctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	h.stop = stop
	h.done = make(chan struct{})
	go h.renew(bctx)
	return h, nil
}

// heldClaim is renewed until it is let go.
type heldClaim struct {
	*claiming
	turn int64
	beat int64
	stop context.CancelFunc
	done chan struct{} // closed when nothing renews it any more
}

func (h *heldClaim) write(ctx context.Context, first bool) error {
	h.beat++
	b, err := json.Marshal(claim{claimVersion, h.s.id, h.beat})
	if err != nil {
		return err
	}
	return blob.PutBytes(ctx, h.s.opts.Blobs, h.turnKey(h.turn), append(b, '\n'), blob.PutOptions{IfAbsent: first})
}

func (h *heldClaim) renew(ctx context.Context) {
	defer close(h.done)
	t := time.NewTicker(h.s.opts.ClaimTTL / beats)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		// Who cannot say that he lives may be taken for dead: the work is then
		// done twice, and is the same twice.
		if err := h.write(ctx, false); err != nil && ctx.Err() == nil {
			h.s.opts.Log.Warn("claim not renewed", "claim", h.key, "error", err)
		}
	}
}

// letGo ends the claim: the work is done or has failed.
func (h *heldClaim) letGo(ctx context.Context) {
	h.stop()
	<-h.done
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	// The highest last: while one is there nobody else begins.
	for turn := max(1, h.turn-beats); turn <= h.turn; turn++ {
		if err := h.s.opts.Blobs.Delete(ctx, h.turnKey(turn)); err != nil {
			h.s.opts.Log.Warn("claim stays", "claim", h.turnKey(turn), "error", err)
		}
	}
	h.s.setWorking(h.key, false)
}

// working tells whether this program is at a claimed work.
func (s *Store) working(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claims[key]
}

func (s *Store) setWorking(key string, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if on {
		s.claims[key] = true
	} else {
		delete(s.claims, key)
	}
}
