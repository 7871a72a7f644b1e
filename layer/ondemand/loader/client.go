package loader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/fuse"
	"github.com/opendsec/dsec/rootfs"
)

// Config of a Client; zero values are the defaults.
type Config struct {
	Socket string // where the loader listens
	Layers string // the directory with the directories of layers
	Keeper rootfs.Keeper
	Log    *slog.Logger

	// Whole is called when all data of a layer are here, durably; Failed when
	// a read of one was answered with an error. They may be called concurrently.
	Whole  func(layer.Digest)
	Failed func(layer.Digest, error)
}

// Client hands layers to a loader, and to the one after it.
type Client struct {
	c Config

	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}
	up   chan struct{} // signalled at each connection; closed never

	mu      sync.Mutex
	conn    *conn // nil: not connected
	next    uint64
	waiting map[uint64]chan frame
	serial  int
}

// prefix of the names of sessions in the Keeper: prefix/hex/number, and there
// "dev" and "journal".
const prefix = "ondemand/"

// Open connects, now or when a loader is there, and hands over what an earlier
// agent left with the Keeper.
func Open(ctx context.Context, c Config) (*Client, error) {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	cl := &Client{c: c, done: make(chan struct{}), waiting: map[uint64]chan frame{}}
	names, err := c.Keeper.Names(ctx, prefix)
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		parts := strings.Split(n, "/")
		if len(parts) == 4 {
			if k, err := strconv.Atoi(parts[2]); err == nil {
				cl.serial = max(cl.serial, k)
			}
		}
	}
	cl.ctx, cl.stop = context.WithCancel(context.Background())
	go cl.run()
	return cl, nil
}

// Close lets go of the loader, which serves on.
func (c *Client) Close() error {
	c.stop()
	<-c.done
	return nil
}

// run keeps a connection until Close.
func (c *Client) run() {
	defer close(c.done)
	for c.ctx.Err() == nil {
		err := c.talk()
		if c.ctx.Err() != nil {
			return
		}
		c.c.Log.Warn("connection to the loader", "err", err)
		select {
		case <-time.After(50 * time.Millisecond): // its successor needs a moment
		case <-c.ctx.Done():
		}
	}
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
	c.conn = me
	c.mu.Unlock()
	defer c.hangUp()
	ended := make(chan error, 1)
	go func() { ended <- c.receive(me) }()
	if err := c.handOver(); err != nil {
		c.c.Log.Error("hand layers to the loader", "err", err)
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
			go c.told(f)
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
		if c.c.Whole != nil {
			c.c.Whole(f.Digest)
		}
	case opTrouble:
		if c.c.Failed != nil {
			c.c.Failed(f.Digest, f.err())
		}
	case opEnded:
		c.forget(f.Session, f.Digest)
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

// Device implements rootfs.Devices: a layer that is whole is its file, another
// one a file whose reads the loader answers.
func (c *Client) Device(ctx context.Context, l layer.Local) (rootfs.Device, error) {
	whole, err := l.Whole()
	if err != nil || whole {
		return rootfs.Device{Path: l.Data}, err
	}
	dev, mount, err := fuse.Mount()
	if err != nil {
		return rootfs.Device{}, dsec.E(dsec.Internal, "mount data of layer", string(l.Digest), err)
	}
	defer dev.Close()
	journal, err := fuse.NewJournal()
	if err != nil {
		return rootfs.Device{}, errors.Join(dsec.E(dsec.Internal, "make journal of layer", string(l.Digest), err), mount.Close())
	}
	defer journal.Close()
	c.mu.Lock()
	c.serial++
	name := prefix + l.Digest.Hex() + "/" + strconv.Itoa(c.serial)
	c.mu.Unlock()
	err = c.c.Keeper.Put(ctx, name+"/journal", journal)
	if err == nil {
		err = c.c.Keeper.Put(ctx, name+"/dev", dev)
	}
	if err == nil {
		// One that is not there now gets it when it comes.
		if err = c.serve(ctx, name, l.Digest, dev, journal); dsec.ClassOf(err) == dsec.Unavailable {
			err = nil
		}
	}
	if err != nil {
		c.drop(context.WithoutCancel(ctx), name)
		return rootfs.Device{}, errors.Join(err, mount.Close())
	}
	return rootfs.Device{Path: fmt.Sprintf("/proc/self/fd/%d", mount.Fd()), Kind: "fuse", Mount: mount}, nil
}

// serve hands a session to the loader.
func (c *Client) serve(ctx context.Context, name string, d layer.Digest, dev, journal *os.File) error {
	dir := filepath.Join(c.c.Layers, d.Hex())
	raw, err := os.ReadFile(filepath.Join(dir, layer.ManifestFile))
	if err != nil {
		return dsec.E(dsec.Internal, "read manifest", string(d), err)
	}
	m, err := layer.DecodeManifest(raw, d)
	if err != nil {
		return err
	}
	f := frame{Op: opServe, Session: name, Digest: d, Table: m.Data.Chunks, Size: m.Data.Size}
	names := []string{layer.DataFile, layer.PresentFile, layer.IndexFile}
	if f.Whole, err = (layer.Local{Info: layer.Info{Digest: d, DataSize: m.Data.Size}, Data: filepath.Join(dir, layer.DataFile)}).Whole(); err != nil {
		return err
	}
	if f.Whole { // it has become so, and who has the session mounted has it still
		names = names[:1]
	}
	var opened frame
	defer opened.close()
	for _, n := range names {
		x, err := os.OpenFile(filepath.Join(dir, n), os.O_RDWR, 0)
		if err != nil {
			return dsec.E(dsec.Internal, "open layer", string(d), err)
		}
		opened.files = append(opened.files, x)
	}
	f.files = append(append([]*os.File(nil), opened.files...), dev, journal)
	_, err = c.ask(ctx, f)
	return err
}

// handOver gives a loader the sessions that it does not serve.
func (c *Client) handOver() error {
	hello, err := c.ask(c.ctx, frame{Op: opHello})
	if err != nil {
		return err
	}
	serves := map[string]bool{}
	for _, n := range hello.Names {
		serves[n] = true
	}
	names, err := c.c.Keeper.Names(c.ctx, prefix)
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range names {
		name, isDev := strings.CutSuffix(n, "/dev")
		if !isDev || serves[name] {
			continue
		}
		if err := c.handOne(name); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (c *Client) handOne(name string) error {
	hex, _, _ := strings.Cut(strings.TrimPrefix(name, prefix), "/")
	d, err := layer.ParseDigest("sha256:" + hex)
	if err != nil {
		return err
	}
	dev, err := c.c.Keeper.Get(c.ctx, name+"/dev")
	if err != nil {
		return err
	}
	defer dev.Close()
	journal, err := c.c.Keeper.Get(c.ctx, name+"/journal")
	if err != nil {
		return err
	}
	defer journal.Close()
	return c.serve(c.ctx, name, d, dev, journal)
}

// forget drops a session whose last user is gone, and the layer with the last.
func (c *Client) forget(name string, d layer.Digest) {
	c.drop(c.ctx, name)
	if _, err := c.ask(c.ctx, frame{Op: opLet, Digest: d}); err != nil && dsec.ClassOf(err) != dsec.IllegalState && c.ctx.Err() == nil {
		c.c.Log.Warn("let go of layer", "layer", d, "err", err)
	}
}

func (c *Client) drop(ctx context.Context, name string) {
	for _, n := range []string{name + "/dev", name + "/journal"} {
		if err := c.c.Keeper.Drop(ctx, n); err != nil && ctx.Err() == nil {
			c.c.Log.Warn("drop session", "name", n, "err", err)
		}
	}
}

// Fetch has ranges of a layer brought, in their order, and waits for them; nil:
// all.
func (c *Client) Fetch(ctx context.Context, d layer.Digest, ranges []layer.Range) error {
	f := frame{Op: opFetch, Digest: d}
	if ranges != nil {
		x, err := rangesFile(ranges)
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
	defer a.close()
	if len(a.files) != 1 {
		return nil, dsec.Errorf(dsec.Internal, "read trace", string(d), "%d descriptors", len(a.files))
	}
	rs, err := readRanges(a.files[0])
	if err != nil {
		return nil, dsec.E(dsec.Internal, "read trace", string(d), err)
	}
	return rs, nil
}

// Status of all layers that are served.
func (c *Client) Status(ctx context.Context) ([]Status, error) {
	a, err := c.ask(ctx, frame{Op: opStatus})
	return a.Layers, err
}
