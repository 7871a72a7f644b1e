package chunking

import (
	"cmp"
	"crypto/sha256"
	"slices"
	"time"
)

// Read is one read of the data file of a layer, as the file system asks for it.
type Read struct {
	Layer string
	Extent
}

// Access is what some work reads, in its order.
type Access struct {
	Name  string
	Reads []Read
}

// Wanted is how many bytes of data files the reads are, each block once.
func (a Access) Wanted() (n int64) {
	type block struct {
		layer string
		n     int64
	}
	seen := map[block]bool{}
	for _, r := range a.Reads {
		for off := r.Off / Block * Block; off < r.Off+r.Len; off += Block {
			b := block{r.Layer, off / Block}
			if !seen[b] {
				seen[b] = true
				n += Block
			}
		}
	}
	return n
}

// Line is how a node is connected to its store.
type Line struct {
	Latency   time.Duration
	Bandwidth float64 // bytes per second
	Parallel  int     // requests at one time
	Gap       int64   // bytes between two chunks that are rather fetched than asked for apart
	Most      int64   // bytes of one request
	Ahead     int64   // bytes behind a read that come with it if it has to wait
}

// Request is one ranged GET and the chunks that it is for.
type Request struct {
	Pack   int
	Off    int64
	Len    int64
	Chunks []Chunk
}

// Cost of an access.
type Cost struct {
	Bytes    int64 // over the line, gaps included
	Plain    int64 // of the chunks, decompressed: what is written on the node
	Chunks   int
	Requests int
	Stalls   int           // reads that waited
	Time     time.Duration // modelled
}

func (c *Cost) add(reqs []Request, l Line) {
	var bytes int64
	for _, r := range reqs {
		bytes += r.Len
		c.Chunks += len(r.Chunks)
		for _, k := range r.Chunks {
			c.Plain += k.Len
		}
	}
	c.Bytes += bytes
	c.Requests += len(reqs)
	rounds := (len(reqs) + l.Parallel - 1) / l.Parallel
	c.Time += time.Duration(rounds)*l.Latency + time.Duration(float64(bytes)/l.Bandwidth*float64(time.Second))
}

// have are the chunks that are on the node. Alone, a layer has only what was
// fetched for it; else a chunk of any layer does for all.
type have struct {
	alone bool
	sums  map[haveKey]bool
}

type haveKey struct {
	layer string
	sum   [sha256.Size]byte
}

// wait is what a read asks for that has to wait, and what comes with it.
func (h *have) wait(p *Packed, r Read, ahead int64) []Chunk {
	out := h.missing(p, r)
	if len(out) > 0 && ahead > 0 {
		out = append(out, h.missing(p, Read{r.Layer, Extent{r.Off + r.Len, ahead}})...)
	}
	return out
}

func (h *have) missing(p *Packed, r Read) (out []Chunk) {
	chunks := p.Layers[r.Layer]
	from, to := over(p.ends[r.Layer], r.Extent)
	for _, c := range chunks[from:to] {
		k := haveKey{sum: c.Sum}
		if h.alone {
			k.layer = r.Layer
		}
		if c.Size > 0 && !h.sums[k] {
			h.sums[k] = true
			out = append(out, c)
		}
	}
	return out
}

// Demand is the cost when each read waits for what it lacks: nothing is known
// beforehand. State carries over what is there from one access to the next;
// nil starts with nothing.
func (p *Packed) Demand(a Access, l Line, s *State) (c Cost) {
	h := s.or()
	for _, r := range a.Reads {
		if reqs := Coalesce(h.wait(p, r, l.Ahead), l); len(reqs) > 0 {
			c.Stalls++
			c.add(reqs, l)
		}
	}
	return c
}

// Prefetch is the cost when all that will be read is known and asked for at once.
func (p *Packed) Prefetch(a Access, l Line, s *State) (c Cost) {
	c.add(p.Plan(a, l, s), l)
	return c
}

// Plan returns the requests of Prefetch.
func (p *Packed) Plan(a Access, l Line, s *State) []Request {
	h := s.or()
	var all []Chunk
	for _, r := range a.Reads {
		all = append(all, h.missing(p, r)...)
	}
	return Coalesce(all, l)
}

// State is what a node has.
type State struct{ have }

// NewState has nothing. Shared: chunks are the node's, not a layer's.
func NewState(shared bool) *State {
	return &State{have{alone: !shared, sums: map[haveKey]bool{}}}
}

func (s *State) or() *have {
	if s == nil {
		s = NewState(false)
	}
	return &s.have
}

// Coalesce makes requests of chunks: neighbours in a pack go together.
func Coalesce(chunks []Chunk, l Line) (reqs []Request) {
	slices.SortFunc(chunks, func(a, b Chunk) int { return cmp.Or(cmp.Compare(a.Pack, b.Pack), cmp.Compare(a.At, b.At)) })
	for _, c := range chunks {
		if n := len(reqs) - 1; n >= 0 {
			r := &reqs[n]
			gap := c.At - r.Off - r.Len
			if r.Pack == c.Pack && gap < 0 { // the same frame for two places
				r.Chunks = append(r.Chunks, c)
				continue
			}
			if r.Pack == c.Pack && gap <= l.Gap && r.Len+gap+c.Size <= l.Most {
				r.Len += gap + c.Size
				r.Chunks = append(r.Chunks, c)
				continue
			}
		}
		reqs = append(reqs, Request{Pack: c.Pack, Off: c.At, Len: c.Size, Chunks: []Chunk{c}})
	}
	return reqs
}
