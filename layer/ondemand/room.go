package ondemand

import (
	"container/list"
	"errors"
	"math"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// Room is what of a disk the layers of a machine may take. What finds none is not
// kept: ReadAt answers with it from memory, where a little of it stays a while,
// because its neighbours are asked for next. Ensure, whose callers read the file,
// fails with NoSpace.
type Room struct {
	mu    sync.Mutex
	left  int64     // that may be taken until SetLeft is called again
	full  time.Time // when something last found no room
	told  bool      // short was called since SetLeft
	short func(diskFull bool)

	most     int64 // bytes in memory
	held     int64
	order    list.List // of *passed, the one wanted last at the front
	by       map[place]*list.Element
	uncached Uncached
}

// Uncached counts what was answered without being kept.
type Uncached struct {
	Reads int64 `json:"reads"`
	Bytes int64 `json:"bytes"`
}

// place of a chunk.
type place struct {
	l     *Layer
	chunk int
}

// passed is a chunk that is not kept.
type passed struct {
	place
	plain []byte
	at    time.Time
}

const (
	passedMemory = 64 << 20
	passedFor    = 30 * time.Second // that it is not wanted
	tightFor     = 5 * time.Second  // nothing is fetched ahead after something found no room
)

// NewRoom has no bound but the disk. short, which may be nil, is called when
// something finds no room, once until SetLeft is called; it must not wait.
func NewRoom(short func(diskFull bool)) *Room {
	return &Room{left: math.MaxInt64, short: short, most: passedMemory, by: map[place]*list.Element{}}
}

// SetLeft says how many bytes more may be kept.
func (r *Room) SetLeft(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left, r.told = n, false
	if n > 0 {
		r.full = time.Time{}
	}
}

// Uncached returns the counts so far.
func (r *Room) Uncached() Uncached {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.uncached
}

// Expire forgets what nobody has wanted for a while.
func (r *Room) Expire() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for e := r.order.Back(); e != nil && time.Since(e.Value.(*passed).at) > passedFor; e = r.order.Back() {
		r.dropLocked(e)
	}
}

var errBound = errors.New("the data of layers take all they may (node.layer_cache)")

// noRoom is that there is none on this machine. That a store has none, or gives
// none, is another thing: what it does not give nobody has.
type noRoom struct{ error }

func (n noRoom) Unwrap() error { return n.error }

func isNoRoom(err error) bool {
	_, ok := errors.AsType[noRoom](err)
	return ok
}

// take takes room; must says that there is no bound but the disk.
func (r *Room) take(n int64, must bool) error {
	r.mu.Lock()
	if r.left >= n || must {
		r.left -= min(n, r.left)
		r.mu.Unlock()
		return nil
	}
	r.mu.Unlock()
	r.found(false)
	return dsec.E(dsec.NoSpace, "keep chunk", "", noRoom{errBound})
}

// found notes that something found no room.
func (r *Room) found(diskFull bool) {
	r.mu.Lock()
	r.full = time.Now()
	tell := !r.told && r.short != nil
	r.told = true
	r.mu.Unlock()
	if tell {
		r.short(diskFull)
	}
}

// tight says that what is fetched now will most likely not be kept.
func (r *Room) tight() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.left <= 0 || !r.full.IsZero() && time.Since(r.full) < tightFor
}

// pass takes a copy of a chunk that is not kept.
func (r *Room) pass(at place, plain []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.by[at]; e != nil {
		r.dropLocked(e)
	}
	for r.held+int64(len(plain)) > r.most && r.order.Len() > 0 {
		r.dropLocked(r.order.Back())
	}
	r.by[at] = r.order.PushFront(&passed{at, append(make([]byte, 0, len(plain)), plain...), time.Now()})
	r.held += int64(len(plain))
}

// copy copies what of a chunk is in memory, from an offset in it; false: it is not.
func (r *Room) copy(at place, p []byte, from int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.by[at]
	if e == nil {
		return false
	}
	x := e.Value.(*passed)
	x.at = time.Now()
	r.order.MoveToFront(e)
	copy(p, x.plain[from:])
	return true
}

func (r *Room) count(bytes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.uncached.Reads++
	r.uncached.Bytes += int64(bytes)
}

// forget drops what is in memory of a layer.
func (r *Room) forget(l *Layer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for at, e := range r.by {
		if at.l == l {
			r.dropLocked(e)
		}
	}
}

func (r *Room) dropLocked(e *list.Element) {
	x := r.order.Remove(e).(*passed)
	delete(r.by, x.place)
	r.held -= int64(len(x.plain))
}

// KeepAll has the layer kept beyond the bound: who reads it reads the file. The
// end of the disk is an error then.
func (l *Layer) KeepAll() { l.keepAll.Store(true) }

// full says that what nobody waits for is better not fetched now.
func (l *Layer) full() bool { return !l.keepAll.Load() && l.opts.Room.tight() }

// land writes a chunk that came and tells who waits. One for which there is no
// room is theirs if they can do without the file; what nobody has waited for, who
// comes to wait for it asks for again.
func (l *Layer) land(i int, plain []byte, wanted bool) error {
	room := l.opts.Room
	err := room.take(int64(len(plain)), l.keepAll.Load())
	if err == nil {
		err = l.parts.Present.Land(i, func() error { return l.write(i, plain) })
	}
	if err == nil {
		l.arrived(i)
		return nil
	}
	if wanted && isNoRoom(err) && !l.keepAll.Load() {
		room.pass(place{l, i}, plain)
	}
	return err
}
