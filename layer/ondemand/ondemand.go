// Package ondemand brings the data of a layer to this machine as it is read.
//
// A Layer is a sparse local file, a note of which chunks of it are here, and
// the place they come from. Ensure returns when the bytes of a range are in the
// file: each chunk was fetched from the blob store, compared with its digest,
// and only then written and noted. What others read of the file before Ensure
// has returned for it is a hole, so nobody may: a mechanism (fuse, precontent)
// stands between the kernel and the file and asks first.
//
// # Promises
//
// A chunk that several ask for is fetched once. Chunks that lie together in a
// pack come in one request; a reader that goes forward is run ahead of, farther
// the longer it does. A failure has the class the store gave it (Unavailable,
// PermissionDenied, NotFound, Corrupt, NoSpace) and is told to those who wait
// for that chunk, at the latest after the deadline; the next who asks tries
// again. Only what took long to fail is told again for half as long, a second at
// most: the kernel asks up to three times for one read, and its reader should
// not wait for three deadlines. A request's deadline begins when it has a lane; who
// joins it late has one of its own. What finds no room (see Room) ReadAt gives
// from memory, verified like everything; it is not noted as here, and fetched again
// when it is asked for later. Nothing here reads, maps or executes what it serves.
//
// All methods may be called concurrently.
package ondemand

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
)

// Parts of an incomplete layer. The Layer owns the files.
type Parts struct {
	Digest  layer.Digest
	Index   layer.Index
	Data    *os.File // of the plain size or longer, open for reading and writing
	Present *layer.Presence
}

// Options of a Layer; zero values are the defaults.
type Options struct {
	Blobs    blob.Store
	Lanes    *Lanes        // shared by all layers of a machine; nil: own ones
	Deadline time.Duration // of a request, its tries included, when it has a lane; and of a reader; default 30 s
	Window   time.Duration // how long after the first read the trace is written; default 2 min
	Room     *Room         // shared by all layers of a machine; nil: the disk
}

// Layer is a layer whose data are coming.
type Layer struct {
	parts Parts
	opts  Options
	offs  []int64

	life context.Context // ends fetches
	end  context.CancelFunc
	work sync.WaitGroup

	trace trace
	asked atomic.Int64 // different bytes, by readers, in whole blocks

	keepAll atomic.Bool

	mu      sync.Mutex
	whole   chan struct{} // closed when all is here
	flights map[int]*flight
	failed  map[int]failure // chunks that were not asked for since
	ahead   readahead
	stats   Stats
	isWhole bool
	closed  bool
}

// flight is a chunk on its way.
type flight struct {
	landed chan struct{} // closed when err is set
	err    error
	since  time.Time // when it was ordered; zero: it failed before
	urgent *urgency  // of the request it came with; nil: none was made
}

// failure is told again to who asks at once.
type failure struct {
	err   error
	until time.Time
}

// Stats count since the Layer was opened.
type Stats struct {
	Requests int64         // to the blob store
	Fetched  int64         // bytes of them, compressed
	Plain    int64         // bytes of chunks that they brought
	Stalls   int64         // calls of Ensure that had to wait
	Stalled  time.Duration // their waits, added
	Failures int64         // calls of Ensure that failed
	Last     error         // of the last failure
}

// Open begins to serve a layer.
func Open(p Parts, o Options) (*Layer, error) {
	if o.Deadline == 0 {
		o.Deadline = 30 * time.Second
	}
	if o.Window == 0 {
		o.Window = 2 * time.Minute
	}
	if o.Lanes == nil {
		o.Lanes = NewLanes(0)
	}
	if o.Room == nil {
		o.Room = NewRoom(nil)
	}
	if o.Blobs == nil {
		return nil, dsec.Errorf(dsec.Invalid, "open layer", string(p.Digest), "no store to fetch from")
	}
	l := &Layer{parts: p, opts: o, offs: p.Index.Offsets(), flights: map[int]*flight{}, failed: map[int]failure{}, whole: make(chan struct{})}
	l.life, l.end = context.WithCancel(context.Background())
	l.trace.begin(o.Window)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noteWholeLocked()
	return l, nil
}

// Digest of the layer.
func (l *Layer) Digest() layer.Digest { return l.parts.Digest }

// Size is the number of plain bytes.
func (l *Layer) Size() int64 { return l.offs[len(l.offs)-1] }

// Complete says whether all is here.
func (l *Layer) Complete() bool { return l.parts.Present.Complete() }

// Whole is closed when all is here. If a Sync finds that some of it has not come to
// the disk, there is another one, for when all is here again.
func (l *Layer) Whole() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.whole
}

// Closed is closed when Close is called.
func (l *Layer) Closed() <-chan struct{} { return l.life.Done() }

func (l *Layer) noteWholeLocked() {
	if !l.isWhole && l.Complete() {
		l.isWhole = true
		close(l.whole)
	}
}

// enter keeps the files open until leave; false: they are closed.
func (l *Layer) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.work.Add(1)
	return true
}

func (l *Layer) leave() { l.work.Done() }

func (l *Layer) gone(op string) error {
	return dsec.E(dsec.Canceled, op, string(l.parts.Digest), os.ErrClosed)
}

// Here is the number of chunks that are here, and of all.
func (l *Layer) Here() (chunks, of int) { return l.parts.Present.Count(), len(l.parts.Index.Chunks) }

// Stats returns the counts so far.
func (l *Layer) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}

// Ensure returns when all bytes of the range that are before the end are in
// the file.
func (l *Layer) Ensure(caller context.Context, off, n int64) error {
	if !l.enter() {
		return l.gone("read layer")
	}
	defer l.leave()
	err := l.ensure(caller, off, n, nil)
	l.note(caller, err)
	return err
}

// note counts a failure; of who went away it is none.
func (l *Layer) note(caller context.Context, err error) {
	if err == nil || caller.Err() != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Failures++
	l.stats.Last = err
}

// ensure is Ensure; had are chunks that the caller does without, nil: none.
func (l *Layer) ensure(caller context.Context, off, n int64, had func(chunk int) bool) error {
	from, to := layer.Span(l.offs, off, n)
	l.asked.Add(l.trace.note(off, min(n, l.Size()-off)))
	if l.here(from, to) {
		l.follow(from, to)
		return nil
	}
	begun := time.Now()
	// A little longer than the fetch, whose error says more.
	ctx, cancel := context.WithTimeout(caller, l.opts.Deadline+time.Second)
	defer cancel()
	err := l.await(ctx, l.take(from, to, had))
	for ctx.Err() == nil && joined(err, begun) {
		err = l.await(ctx, l.takeAfresh(from, to, had))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Stalls++
	l.stats.Stalled += time.Since(begun)
	if err != nil {
		err = dsec.E(dsec.ClassOf(err), "read layer", string(l.parts.Digest), err)
	}
	return err
}

func (l *Layer) here(from, to int) bool {
	for i := from; i < to; i++ {
		if !l.parts.Present.Has(i) {
			return false
		}
	}
	return true
}

func (l *Layer) await(ctx context.Context, flights []*flight) error {
	var full error // the others may be had
	for _, f := range flights {
		select {
		case <-f.landed:
			if isNoRoom(f.err) {
				full = f.err
			} else if dsec.ClassOf(f.err) == dsec.Timeout {
				return &late{f}
			} else if f.err != nil {
				return f.err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return full
}

// late is that a flight took too long.
type late struct{ f *flight }

func (l *late) Error() string { return l.f.err.Error() }
func (l *late) Unwrap() error { return l.f.err }

// joined says that a request took too long that was ordered before: who came to
// wait for it then has waited for less than it may.
func joined(err error, then time.Time) bool {
	l, ok := errors.AsType[*late](err)
	return ok && !l.f.since.IsZero() && l.f.since.Before(then)
}

// Fill fetches what is missing of all, in the order of the data.
func (l *Layer) Fill(ctx context.Context) error {
	return l.Prefetch(ctx, []Range{{Off: 0, Len: l.Size()}})
}

// Prefetch fetches the ranges in their order, behind whatever readers wait for.
// Readers of them are not run ahead of: what is read is known. It asks for the
// first few chunks, then for twice as many and so on, each time for what lies
// together at once: the order of what comes late matters less than the number of
// requests.
func (l *Layer) Prefetch(ctx context.Context, ranges []Range) error {
	if !l.enter() {
		return l.gone("prefetch layer")
	}
	defer l.leave()
	if l.full() {
		return dsec.Errorf(dsec.NoSpace, "prefetch layer", string(l.parts.Digest), "there is no room for what nobody reads yet")
	}
	l.mu.Lock()
	for _, r := range ranges {
		from, to := layer.Span(l.offs, r.Off, r.Len)
		l.ahead.expect(from, to, len(l.parts.Index.Chunks))
	}
	l.mu.Unlock()
	var before []*flight
	for batch := range l.batches(ranges) {
		now := l.order(batch)
		if err := l.await(ctx, before); err != nil {
			return dsec.E(dsec.ClassOf(err), "prefetch layer", string(l.parts.Digest), err)
		}
		before = now
	}
	if err := l.await(ctx, before); err != nil {
		return dsec.E(dsec.ClassOf(err), "prefetch layer", string(l.parts.Digest), err)
	}
	return nil
}

// Sync makes durable what is here. What could not be written to the disk is
// fetched again: nobody may read what the kernel has left in its place.
func (l *Layer) Sync() error {
	if !l.enter() {
		return l.gone("sync layer")
	}
	defer l.leave()
	if err := l.parts.Present.Sync(l.parts.Data); err != nil {
		l.mu.Lock()
		if l.isWhole && !l.Complete() {
			l.isWhole, l.whole = false, make(chan struct{})
		}
		l.mu.Unlock()
		return dsec.E(fault.Class(err, dsec.Internal), "sync layer", string(l.parts.Digest), err)
	}
	// Who read it has its own copy in memory.
	_ = unix.Fadvise(int(l.parts.Data.Fd()), 0, 0, unix.FADV_DONTNEED) // only advice
	return nil
}

// Close ends what is being fetched, and with Canceled the calls that wait for
// it, and lets go of the files.
func (l *Layer) Close() error {
	l.mu.Lock()
	again := l.closed
	l.closed = true
	l.mu.Unlock()
	l.end()
	l.work.Wait()
	l.opts.Room.forget(l)
	if again {
		return nil
	}
	err := l.parts.Present.Close()
	if e := l.parts.Data.Close(); err == nil {
		err = e
	}
	return err
}

func (l *Layer) write(i int, plain []byte) error {
	_, err := l.parts.Data.WriteAt(plain, l.offs[i])
	if err == nil {
		return nil
	}
	class := fault.Class(err, dsec.Internal)
	if class == dsec.NoSpace {
		l.opts.Room.found(true)
		err = noRoom{err}
	}
	return dsec.E(class, "write chunk", strconv.Itoa(i), err)
}

// arrived tells who waits for a chunk that is noted as here.
func (l *Layer) arrived(i int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Plain += int64(l.parts.Index.Chunks[i].Size)
	delete(l.failed, i)
	if f := l.flights[i]; f != nil {
		delete(l.flights, i)
		close(f.landed)
	}
	l.noteWholeLocked()
}

// crash tells who waits for chunks of a run that they do not come. It tells
// nobody whose chunk has been asked for again since.
func (l *Layer) crash(r *run, chunks []int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, i := range chunks {
		if f := l.flights[i]; f != nil && f.urgent == r.urgent {
			f.err = err
			if err == nil { // a wait may end well only by arrived
				f.err = dsec.Errorf(dsec.Internal, "read chunk", strconv.Itoa(i), "it was not among those that came")
			}
			delete(l.flights, i)
			close(f.landed)
			if isNoRoom(f.err) && !l.keepAll.Load() {
				continue // it was had
			}
			l.failed[i] = failure{err: f.err, until: time.Now().Add(min(time.Since(r.begun)/2, time.Second))}
		}
	}
}

// decoders are shared: each holds buffers of the size of a chunk.
var decoder = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(layer.MaxChunk))
})

// unpack returns the plain bytes of a chunk, verified, in buf if they fit.
func unpack(c *layer.Chunk, frame, buf []byte) ([]byte, error) {
	z, err := decoder()
	if err != nil {
		return nil, err
	}
	plain, err := z.DecodeAll(frame, buf[:0])
	if err == nil && (len(plain) != int(c.Size) || sha256.Sum256(plain) != c.Sum) {
		err = fmt.Errorf("content has another digest")
	}
	return plain, err
}
