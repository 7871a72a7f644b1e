package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/fuse"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
	"github.com/opendsec/dsec/rootfs"
)

// Mechanisms by which reads of what is not here come to the loader.
const (
	FUSE       = "fuse"
	PreContent = "pre-content"
)

// What the Keeper has. A session is prefix/hex/number; with FUSE there is its
// "dev" and "journal", with events "data", opened before it was marked.
const (
	prefix       = "ondemand/"
	groupName    = prefix + "group"
	eventsName   = prefix + "events"
	devName      = "/dev"
	journalName  = "/journal"
	dataName     = "/data"
	partsOfNames = 4 // of what is below a session
)

// highest is the largest number of a session.
func highest(names []string) (n int) {
	for _, name := range names {
		if parts := strings.Split(name, "/"); len(parts) == partsOfNames {
			if k, err := strconv.Atoi(parts[2]); err == nil {
				n = max(n, k)
			}
		}
	}
	return n
}

func (c *Client) newName(d layer.Digest) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.serial++
	return prefix + d.Hex() + "/" + strconv.Itoa(c.serial)
}

// numberOf a session: with its layer it names it.
func numberOf(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// Device implements rootfs.Devices: a layer that is whole is its file, another
// one a file whose reads the loader answers.
func (c *Client) Device(ctx context.Context, l layer.Local) (rootfs.Device, error) {
	whole, err := l.Whole()
	if err != nil || whole {
		return rootfs.Device{Path: l.Data}, err
	}
	var d rootfs.Device
	if c.c.Mechanism == PreContent {
		d, err = c.marked(ctx, l)
	} else {
		d, err = c.mounted(ctx, l)
	}
	if err == nil {
		now := c.life(l.Digest)
		c.work.Go(func() { c.accompany(l.Digest, now) })
	}
	return d, err
}

// mounted is a device by FUSE.
func (c *Client) mounted(ctx context.Context, l layer.Local) (rootfs.Device, error) {
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
	name := c.newName(l.Digest)
	err = c.c.Keeper.Put(ctx, name+journalName, journal)
	if err == nil {
		err = c.c.Keeper.Put(ctx, name+devName, dev)
	}
	if err == nil {
		// A loader that is not there now gets it when it comes.
		if err = c.serve(ctx, name, l.Digest, dev, journal); dsec.ClassOf(err) == dsec.Unavailable {
			err = nil
		}
	}
	if err != nil {
		c.drop(context.WithoutCancel(ctx), name)
		return rootfs.Device{}, errors.Join(err, mount.Close())
	}
	return rootfs.Device{Path: fmt.Sprintf("/proc/self/fd/%d", mount.Fd()), Kind: FUSE, Mount: mount, Session: numberOf(name)}, nil
}

// marked is the data file itself, of whose reads the kernel asks. Who answers
// has to know the file before the kernel asks.
func (c *Client) marked(ctx context.Context, l layer.Local) (rootfs.Device, error) {
	c.marking.Lock()
	defer c.marking.Unlock()
	device := rootfs.Device{Path: l.Data, Kind: PreContent, NoLoop: true}
	data, err := os.OpenFile(l.Data, os.O_RDWR, 0)
	if err != nil {
		return device, dsec.E(dsec.Internal, "open layer", string(l.Digest), err)
	}
	defer data.Close()
	if marked, err := c.isMarked(ctx, l.Digest, data); err != nil || marked {
		return device, err
	}
	group, err := c.group(ctx)
	if err != nil {
		return device, err
	}
	name := c.newName(l.Digest)
	err = c.c.Keeper.Put(ctx, name+dataName, data)
	if err == nil {
		var whole bool
		if whole, err = c.serveMarked(ctx, name, l.Digest, data); err == nil && whole {
			// The last of it has come meanwhile: nobody would unmark it any more.
			c.drop(ctx, name)
			return rootfs.Device{Path: l.Data}, nil
		}
	}
	if err == nil {
		err = precontent.Mark(group, data)
	}
	if err != nil {
		c.drop(context.WithoutCancel(ctx), name)
	}
	return device, err
}

// isMarked says whether the file is one of whose reads the kernel asks. A file of
// the layer before it, which was removed or evicted since, is let go: what still
// reads that one gets errors.
func (c *Client) isMarked(ctx context.Context, d layer.Digest, data *os.File) (bool, error) {
	names, err := c.c.Keeper.Names(ctx, prefix+d.Hex()+"/")
	if err != nil {
		return false, err
	}
	is, err := data.Stat()
	if err != nil {
		return false, dsec.E(dsec.Internal, "open layer", string(d), err)
	}
	for _, n := range names {
		name, ok := strings.CutSuffix(n, dataName)
		if !ok {
			continue
		}
		kept, err := c.c.Keeper.Get(ctx, n)
		if err != nil {
			return false, err
		}
		was, err := kept.Stat()
		_ = kept.Close() // only looked at
		if err != nil {
			return false, dsec.E(dsec.Internal, "open layer", string(d), err)
		}
		if os.SameFile(was, is) {
			return true, nil
		}
		if err := c.endEvents(ctx, name, d); err != nil {
			return false, err
		}
	}
	return false, nil
}

// group is the group of this machine, made once. It is held here as long as the
// agent lives, so that it outlives hold or loader.
func (c *Client) group(ctx context.Context) (*os.File, error) {
	if c.held != nil {
		return c.held, nil
	}
	group, err := c.c.Keeper.Get(ctx, groupName)
	if err == nil {
		c.held = group
		return group, nil
	}
	if dsec.ClassOf(err) != dsec.NotFound {
		return nil, err
	}
	if group, err = precontent.NewGroup(); err != nil {
		return nil, err
	}
	journal, err := precontent.NewJournal()
	if err != nil {
		return nil, errors.Join(err, group.Close())
	}
	defer journal.Close()
	if err = c.c.Keeper.Put(ctx, eventsName, journal); err == nil {
		err = c.c.Keeper.Put(ctx, groupName, group)
	}
	if err == nil {
		_, err = c.ask(ctx, frame{Op: opEvents, files: []*os.File{group, journal}})
	}
	if err != nil {
		return nil, errors.Join(err, c.c.Keeper.Drop(context.WithoutCancel(ctx), groupName), group.Close())
	}
	c.held = group
	return group, nil
}

// serve hands a session by FUSE to the loader.
func (c *Client) serve(ctx context.Context, name string, d layer.Digest, dev, journal *os.File) error {
	f, close, err := c.parts(name, d)
	if err != nil {
		return err
	}
	defer close()
	f.files = append(f.files, dev, journal)
	_, err = c.ask(ctx, f)
	return err
}

// serveMarked hands a session by events to the loader, and says whether the layer
// is whole.
func (c *Client) serveMarked(ctx context.Context, name string, d layer.Digest, data *os.File) (whole bool, err error) {
	f, close, err := c.parts(name, d)
	if err != nil {
		return false, err
	}
	defer close()
	f.files = append([]*os.File{data}, f.files[1:]...)
	_, err = c.ask(ctx, f)
	return f.Whole, err
}

// parts is a serve with the files of the layer, which close closes.
func (c *Client) parts(name string, d layer.Digest) (f frame, close func(), err error) {
	dir := filepath.Join(c.c.Layers, d.Hex())
	raw, err := os.ReadFile(filepath.Join(dir, layer.ManifestFile))
	if err != nil {
		return f, nil, dsec.E(dsec.Internal, "read manifest", string(d), err)
	}
	m, err := layer.DecodeManifest(raw, d)
	if err != nil {
		return f, nil, err
	}
	f = frame{Op: opServe, Session: name, Digest: d, Table: m.Data.Chunks, Size: m.Data.Size}
	names := []string{layer.DataFile, layer.PresentFile, layer.IndexFile}
	l := layer.Local{Info: layer.Info{Digest: d, DataSize: m.Data.Size}, Data: filepath.Join(dir, layer.DataFile)}
	if f.Whole, err = l.Whole(); err != nil {
		return f, nil, err
	}
	if f.Whole { // it has become so, and who has it mounted has it still
		names = names[:1]
	}
	opened := frame{}
	for _, n := range names {
		x, err := os.OpenFile(filepath.Join(dir, n), os.O_RDWR, 0)
		if err != nil {
			opened.close()
			return f, nil, dsec.E(dsec.Internal, "open layer", string(d), err)
		}
		opened.files = append(opened.files, x)
	}
	f.files = append([]*os.File(nil), opened.files...)
	return f, opened.close, nil
}

// handOver gives a loader what it does not serve.
func (c *Client) handOver() error {
	hello, err := c.ask(c.ctx, frame{Op: opHello})
	if err != nil {
		return err
	}
	served, err := listOf[string](&hello)
	if err != nil {
		return err
	}
	serves := map[string]bool{}
	for _, n := range served {
		serves[n] = true
	}
	names, err := c.c.Keeper.Names(c.ctx, prefix)
	if err != nil {
		return err
	}
	var errs []error
	if !hello.Events {
		errs = append(errs, c.handGroup())
	}
	for _, n := range names {
		for _, kind := range []string{devName, dataName} {
			if name, ok := strings.CutSuffix(n, kind); ok && !serves[name] {
				errs = append(errs, c.handOne(name, kind))
			}
		}
	}
	_, err = c.ask(c.ctx, frame{Op: opReady})
	return errors.Join(append(errs, err)...)
}

// handGroup gives a loader the group, if there is one.
func (c *Client) handGroup() error {
	group, err := c.c.Keeper.Get(c.ctx, groupName)
	if dsec.ClassOf(err) == dsec.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	defer group.Close()
	journal, err := c.c.Keeper.Get(c.ctx, eventsName)
	if err != nil {
		return err
	}
	defer journal.Close()
	_, err = c.ask(c.ctx, frame{Op: opEvents, files: []*os.File{group, journal}})
	return err
}

func (c *Client) handOne(name, kind string) error {
	hex, _, _ := strings.Cut(strings.TrimPrefix(name, prefix), "/")
	d, err := layer.ParseDigest("sha256:" + hex)
	if err != nil {
		return err
	}
	first, err := c.c.Keeper.Get(c.ctx, name+kind)
	if err != nil {
		return err
	}
	defer first.Close()
	if kind == dataName {
		whole, err := c.serveMarked(c.ctx, name, d, first)
		if err == nil && whole {
			// It became so when there was no agent that could have been told. The loader
			// knows it for those who wait for an answer.
			err = c.unmark(d)
		}
		return err
	}
	journal, err := c.c.Keeper.Get(c.ctx, name+journalName)
	if err != nil {
		return err
	}
	defer journal.Close()
	return c.serve(c.ctx, name, d, first, journal)
}

// unmark lets everybody read the data of a layer that is whole.
func (c *Client) unmark(d layer.Digest) error {
	c.marking.Lock()
	defer c.marking.Unlock()
	names, err := c.c.Keeper.Names(c.ctx, prefix+d.Hex()+"/")
	if err != nil {
		return err
	}
	for _, n := range names {
		name, ok := strings.CutSuffix(n, dataName)
		if !ok {
			continue
		}
		if err := c.unmarkKept(c.ctx, n); err != nil {
			return err
		}
		c.drop(c.ctx, name)
	}
	return nil
}

func (c *Client) unmarkKept(ctx context.Context, name string) error {
	group, err := c.group(ctx)
	if err != nil {
		return err
	}
	data, err := c.c.Keeper.Get(ctx, name)
	if err != nil {
		return err
	}
	defer data.Close()
	return precontent.Unmark(group, data)
}

func (c *Client) drop(ctx context.Context, name string) {
	for _, n := range []string{devName, journalName, dataName} {
		if err := c.c.Keeper.Drop(ctx, name+n); err != nil && ctx.Err() == nil {
			c.c.Log.Warn("drop session", "name", name, "err", err)
		}
	}
}
