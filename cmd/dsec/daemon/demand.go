package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/fuse"
	"github.com/opendsec/dsec/layer/ondemand/loader"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/node/nodeapi"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
)

// demand is what has the layers mounted and brings their data.
type demand struct {
	loader *loader.Client
	mounts *rootfs.Mounts
}

// letGoWithin is how long the kernel may take to let go of a mount that nobody
// uses: it does so behind the end of the last sandbox.
const letGoWithin = 30 * time.Second

// letGo unmounts a layer that nobody leases and has the loader close its files.
func (d demand) letGo(ctx context.Context, digest layer.Digest) error {
	ctx, cancel := context.WithTimeout(ctx, letGoWithin)
	defer cancel()
	d.loader.Note(digest)
	if err := d.mounts.EvictLayer(ctx, digest); err != nil {
		return err
	}
	return d.loader.Leave(ctx, digest)
}

func (l *layers) Evict(ctx context.Context, ref dsec.LayerRef) (int64, error) {
	return l.store.Evict(ctx, ref, l.demand.letGo)
}

// OnDemand looks at the layers that the caller has a name for, or an image they
// are in.
func (l *layers) OnDemand(ctx context.Context) ([]nodeapi.Demand, error) {
	mine, err := l.store.List(ctx)
	if err != nil {
		return nil, err
	}
	all, err := l.store.View("").List(ctx)
	if err != nil {
		return nil, err
	}
	tags := map[layer.Digest][]string{}
	for _, e := range mine {
		parts := []layer.Part{{Digest: e.Digest}}
		if len(e.Layers) > 0 {
			parts = e.Layers
		}
		for _, p := range parts {
			tags[p.Digest] = append(tags[p.Digest], e.Tags...)
		}
	}
	served := map[layer.Digest]loader.Status{}
	status, err := l.demand.loader.Status(ctx)
	if err != nil && dsec.ClassOf(err) != dsec.Unavailable { // that it does not run is to be seen
		return nil, err
	}
	for _, s := range status {
		served[s.Digest] = s
	}
	var out []nodeapi.Demand
	for _, e := range all {
		named, ok := tags[e.Digest]
		if !ok || len(e.Layers) > 0 {
			continue
		}
		one, err := l.demanded(e, served)
		if dsec.ClassOf(err) == dsec.NotFound { // it was removed since
			continue
		}
		if err != nil {
			return nil, err
		}
		if one.Touched < 0 && !one.Served && one.Here == one.Chunks {
			continue
		}
		one.Tags = slices.Compact(slices.Sorted(slices.Values(named)))
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b nodeapi.Demand) int { return int(min(1, max(-1, b.DataSize-a.DataSize))) })
	return out, nil
}

func (l *layers) demanded(e store.Entry, served map[layer.Digest]loader.Status) (out nodeapi.Demand, err error) {
	d := e.Digest
	out = nodeapi.Demand{Digest: d, DataSize: e.DataSize, Touched: -1}
	if out.Here, out.Chunks, err = l.store.Here(d); err != nil {
		return out, err
	}
	if s, ok := served[d]; ok {
		out.Served = true
		out.Requests, out.Fetched, out.Plain, out.Stalls, out.Stalled, out.Failures, out.Last = s.Requests, s.Fetched, s.Plain, s.Stalls, s.Stalled, s.Failures, s.Last
	}
	mount, err := l.demand.mounts.Mounted(d)
	if err != nil || mount == nil {
		return out, err
	}
	defer mount.Close()
	ranges, err := l.store.Resident(d, mount)
	out.Touched = 0
	for _, r := range ranges {
		out.Touched += r.Len
	}
	return out, err
}

// demandCheck says how the data of layers come.
func (a *agent) demandCheck(ctx context.Context, s *settings) runtime.Check {
	c := runtime.Check{Name: "layers on demand"}
	if s.Node.OnDemand == "off" {
		c.Detail = offDetail
		return c
	}
	counts, err := a.loader.Counts(ctx)
	if err != nil {
		c.Detail = fmt.Sprintf("%s; reads of what is not here wait: %v", s.Node.OnDemand, err)
		return c
	}
	all, err := a.store.List(ctx)
	if err != nil {
		c.Detail = err.Error()
		return c
	}
	c.OK, c.Detail = true, fmt.Sprintf("%s, the loader is process %d, %d layers have not come whole", s.Node.OnDemand, counts.PID, incomplete(a.store, all))
	if t := counts.Uncached; t.Reads > 0 {
		c.Detail += fmt.Sprintf("; %d uncached reads of %d bytes were answered without keeping them: the disk is or was full, or node.layer_cache (%s) reached", t.Reads, t.Bytes, s.Node.LayerCache)
	}
	c.Detail += "; " + whenFull[s.Node.OnDemand]
	if s.Node.OnDemand != loader.PreContent { // which was tried when the agent started, or it would not run
		c.Detail += "; " + alternative(s.layerDir())
	}
	return c
}

// demandProbe says how the data of layers would come if the agent ran; dir is a
// directory like the one that they would come to.
func demandProbe(s *settings, dir string) runtime.Check {
	c := runtime.Check{Name: "layers on demand"}
	var err error
	switch s.Node.OnDemand {
	case "off":
		c.Detail = offDetail
		return c
	case loader.PreContent:
		err = precontent.Supported(dir)
	default:
		var dev, mount *os.File
		if dev, mount, err = fuse.Mount(); err == nil {
			err = errors.Join(dev.Close(), mount.Close())
		}
	}
	if err != nil {
		c.Detail = fmt.Sprintf("%s does not work: %v; ", s.Node.OnDemand, err)
	} else {
		c.OK, c.Detail = true, s.Node.OnDemand+", no agent runs; "+whenFull[s.Node.OnDemand]+"; "
	}
	c.Detail += alternative(dir)
	return c
}

// whenFull is what becomes of reads for which there is no room.
var whenFull = map[string]string{
	loader.FUSE:       "what finds no room on the disk is answered without keeping it",
	loader.PreContent: "what finds no room on the disk is an error for who reads it",
}

const offDetail = "off (node.on_demand): layers are fetched whole"

// alternative says whether the mechanism would work that is not the default.
func alternative(dir string) string {
	if err := precontent.Supported(dir); err != nil {
		return "pre-content events are not possible: " + err.Error()
	}
	return "pre-content events are possible"
}

func incomplete(s *store.Store, all []store.Entry) (n int) {
	for _, e := range all {
		if len(e.Layers) > 0 {
			continue
		}
		if here, of, err := s.Here(e.Digest); err == nil && here < of {
			n++
		}
	}
	return n
}
