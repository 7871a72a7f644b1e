package loader

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
	"github.com/opendsec/dsec/rootfs"
)

// Config of a Client; zero values are the defaults.
type Config struct {
	Socket string // where the loader listens
	Layers string // the directory with the directories of layers
	Keeper rootfs.Keeper
	Log    *slog.Logger

	// Mechanism of new mounts; default FUSE.
	Mechanism string

	// Ending is that of an agent which only takes apart what is there. The loader
	// has ended before it: none is missed.
	Ending bool

	// Whole is called when all data of a layer are here, durably.
	Whole func(context.Context, layer.Digest)

	// Failed is called when reads of a layer will be answered with an error. It
	// returns true when it is written down, durably, who may have been told: the
	// readers are told then. If it returns false it is called again a little later,
	// or by the next agent. It may be called concurrently, and again for the same.
	Failed func(context.Context, Trouble) bool

	// Ended is called when what a device came by (rootfs.Device.Session) has
	// ended: the kernel has let go of the mount, or nobody can read it any more.
	// What is kept of it is dropped when it returns true; if it returns false it is
	// called again a little later, or by the next agent.
	Ended func(context.Context, Ended) bool

	// Short is called when a loader has come, and when something found no room
	// to be kept, on the disk or within what Room has said, which is to be told
	// again then.
	Short func(ctx context.Context, diskFull bool)

	// Order is what to bring of a layer that is about to be read, before it is
	// asked for; Read is called with what was read first, some time after a
	// layer was mounted and when it is let go. nil: neither.
	Order func(context.Context, layer.Digest) []layer.Range
	Read  func(context.Context, layer.Digest, []layer.Range)
	// Window is that time; default 2 min and a little.
	Window time.Duration
}

// Trouble is that reads of a layer fail.
type Trouble struct {
	Layer   layer.Digest
	Session string    // the rootfs.Device.Session in which they do; "": any of those that read the layer
	At      time.Time // none that this speaks of failed before
	Err     error     // of the last one, or of one that is worse
}

// Ended is that a session has ended.
type Ended struct {
	Layer   layer.Digest
	Session string // rootfs.Device.Session
	At      time.Time
}

// Client hands layers to a loader, and to the one after it.
type Client struct {
	c Config

	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}

	work    sync.WaitGroup
	marking sync.Mutex // of marks, and of held
	held    *os.File   // the group, once there is one

	mu      sync.Mutex
	conn    *conn     // nil: not connected
	since   time.Time // that of the connection, or of the last one
	next    uint64
	waiting map[uint64]chan frame
	serial  int
	lives   map[layer.Digest]*life // of layers that were mounted
	ended   chan struct{}          // closed, and made anew, when a session was forgotten
	ending  map[string]bool        // sessions that have ended and are not forgotten yet
}

// life is the time between the first mount of a layer and that nobody has it any
// more. It has one trace.
type life struct{ noted bool }

// Open connects, now or when a loader is there, and hands over what an earlier
// agent left with the Keeper.
func Open(ctx context.Context, c Config) (*Client, error) {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Window == 0 {
		c.Window = 2*time.Minute + 10*time.Second
	}
	cl := &Client{c: c, done: make(chan struct{}), waiting: map[uint64]chan frame{}, lives: map[layer.Digest]*life{},
		ended: make(chan struct{}), ending: map[string]bool{}}
	names, err := c.Keeper.Names(ctx, prefix)
	if err != nil {
		return nil, err
	}
	cl.serial = highest(names)
	cl.ctx, cl.stop = context.WithCancel(context.Background())
	go cl.run()
	return cl, nil
}

// Close lets go of the loader, which serves on.
func (c *Client) Close() error {
	c.stop()
	<-c.done
	c.work.Wait()
	if c.held != nil {
		return c.held.Close()
	}
	return nil
}

// How long the client waits before it connects again: its successor needs a
// moment. One of another version ends every connection at once.
const (
	leastWait = 50 * time.Millisecond
	mostWait  = time.Second
)

// run keeps a connection until Close.
func (c *Client) run() {
	defer close(c.done)
	wait := leastWait
	for c.ctx.Err() == nil {
		begun := time.Now()
		err := c.talk()
		if c.ctx.Err() != nil {
			return
		}
		c.missing("connection to the loader", "err", err)
		if time.Since(begun) > mostWait {
			wait = leastWait
		}
		_ = within.Sleep(c.ctx, wait) // the loop sees whether it was cut short
		wait = min(2*wait, mostWait)
	}
}

// missing says what comes of there being no loader.
func (c *Client) missing(what string, args ...any) {
	level := slog.LevelWarn
	if c.c.Ending {
		level = slog.LevelDebug
	}
	c.c.Log.Log(c.ctx, level, what, args...)
}

// talk is one connection.
func (c *Client) talk() error {
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: c.c.Socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	stop := context.AfterFunc(c.ctx, func() { _ = uc.Close() })
	defer stop()
	defer uc.Close()
	me := &conn{c: uc}
	c.mu.Lock()
	c.conn, c.since = me, time.Now()
	c.mu.Unlock()
	ended := make(chan error, 1)
	go func() {
		err := c.receive(me)
		c.hangUp() // also who hands over waits for answers
		ended <- err
	}()
	if err := c.handOver(); err != nil {
		c.c.Log.Error("hand layers to the loader", "err", err)
	}
	if c.c.Short != nil {
		c.work.Go(func() { c.c.Short(c.ctx, false) })
	}
	return <-ended
}

// hangUp tells who waits for an answer that none comes.
func (c *Client) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn = nil
	for id, w := range c.waiting {
		close(w)
		delete(c.waiting, id)
	}
}

func (c *Client) receive(me *conn) error {
	buf := make([]byte, maxFrame)
	for {
		f, err := me.recv(buf)
		if err != nil {
			return err
		}
		if f.ID == 0 {
			c.work.Go(func() { c.told(f) })
			continue
		}
		c.mu.Lock()
		w := c.waiting[f.ID]
		delete(c.waiting, f.ID)
		c.mu.Unlock()
		if w == nil {
			f.close()
			continue
		}
		w <- f
	}
}

// told acts on what the loader says by itself.
func (c *Client) told(f frame) {
	defer f.close()
	switch f.Op {
	case opDone:
		if err := c.unmark(f.Digest); err != nil {
			c.c.Log.Error("unmark layer", "layer", f.Digest, "err", err)
			return
		}
		if c.c.Whole != nil {
			c.c.Whole(c.ctx, f.Digest)
		}
	case opTrouble:
		c.troubled(&f)
	case opShort:
		if c.c.Short != nil {
			c.c.Short(c.ctx, f.Full)
		}
	case opEnded:
		c.sessionEnded(&f)
	}
}

// errNoLoader: the answer is not known, the request may have been served.
var errNoLoader = errors.New("the loader is not running")

// ask sends a request and waits for its answer.
func (c *Client) ask(ctx context.Context, f frame) (frame, error) {
	w := make(chan frame, 1)
	c.mu.Lock()
	me := c.conn
	c.next++
	f.ID = c.next
	if me != nil {
		c.waiting[f.ID] = w
	}
	c.mu.Unlock()
	if me == nil {
		return frame{}, dsec.E(dsec.Unavailable, "ask the loader", string(f.Op), errNoLoader)
	}
	if err := me.send(f); err != nil {
		c.mu.Lock()
		delete(c.waiting, f.ID)
		c.mu.Unlock()
		return frame{}, dsec.E(dsec.Unavailable, "ask the loader", string(f.Op), err)
	}
	select {
	case a, ok := <-w:
		if !ok {
			return frame{}, dsec.E(dsec.Unavailable, "ask the loader", string(f.Op), errNoLoader)
		}
		return a, a.err()
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.waiting, f.ID)
		c.mu.Unlock()
		return frame{}, dsec.E(dsec.ClassOf(ctx.Err()), "ask the loader", string(f.Op), ctx.Err())
	}
}

// Fetch has ranges of a layer brought, in their order, and waits for them; nil:
// all.
func (c *Client) Fetch(ctx context.Context, d layer.Digest, ranges []layer.Range) error {
	f := frame{Op: opFetch, Digest: d}
	if ranges != nil {
		x, err := listFile(ranges)
		if err != nil {
			return dsec.E(dsec.Internal, "fetch layer", string(d), err)
		}
		defer x.Close()
		f.files = []*os.File{x}
	}
	_, err := c.ask(ctx, f)
	return err
}

// Trace is what was read first of a layer that is served.
func (c *Client) Trace(ctx context.Context, d layer.Digest) ([]layer.Range, error) {
	a, err := c.ask(ctx, frame{Op: opTrace, Digest: d})
	if err != nil {
		return nil, err
	}
	return listOf[layer.Range](&a)
}

// listOf is the list in an answer, which it closes.
func listOf[T any](a *frame) ([]T, error) {
	defer a.close()
	if len(a.files) != 1 {
		return nil, dsec.Errorf(dsec.Internal, "read answer of the loader", string(a.Op), "%d descriptors", len(a.files))
	}
	list, err := readList[T](a.files[0])
	if err != nil {
		return nil, dsec.E(dsec.Internal, "read answer of the loader", string(a.Op), err)
	}
	return list, nil
}

// Status of all layers that are served.
func (c *Client) Status(ctx context.Context) ([]Status, error) {
	a, err := c.ask(ctx, frame{Op: opStatus})
	if err != nil {
		return nil, err
	}
	return listOf[Status](&a)
}

// Room says how many bytes more the loader may keep of what is read by FUSE. What
// is beyond it answers without keeping it. By events all is kept.
func (c *Client) Room(ctx context.Context, left int64) error {
	_, err := c.ask(ctx, frame{Op: opRoom, Left: left})
	return err
}

// Counts of the whole loader.
type Counts struct {
	PID      int
	Uncached ondemand.Uncached // what it has answered without keeping it
	Blobs    json.RawMessage   // what its object storage counts; nil: nothing
}

// Counts asks the loader; Unavailable if none runs.
func (c *Client) Counts(ctx context.Context) (Counts, error) {
	a, err := c.ask(ctx, frame{Op: opCounts})
	out := Counts{PID: a.PID, Blobs: a.Blobs}
	if a.Uncached != nil {
		out.Uncached = *a.Uncached
	}
	return out, err
}
