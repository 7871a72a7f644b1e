package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
)

// Way is one way to give a sandbox its workspace and its toolkits.
type Way struct {
	Name    string
	Runtime Runtime  // the layers it starts with; Argv says that all is there
	Archive []string // files that are unpacked in each sandbox, one after the other
	Unpack  []string // the command that does it, the archive on its stdin
}

// SetUp is what it took until all of many sandboxes were ready.
type SetUp struct {
	Way     string        `json:"way"`
	Round   int           `json:"round"`
	N       int           `json:"n"`
	Wall    time.Duration `json:"wall"` // until the last was ready
	P50     time.Duration `json:"p50"`  // of one
	P99     time.Duration `json:"p99"`
	Each    int64         `json:"each"`    // bytes that a sandbox's disk counts, mean
	Written int64         `json:"written"` // bytes that reached the device of the disks, all together
}

// Disks is what is asked of the disks of the sandboxes.
type Disks struct {
	Used    func(ctx context.Context, id dsec.SandboxID) (int64, error) // bytes that count against its limit
	Written func(ctx context.Context) (int64, error)                    // bytes written to their device so far, all of them synced
}

// Fresh makes n sandboxes, so many at once, and measures until all are ready.
func (w Way) Fresh(ctx context.Context, n, atOnce int, d Disks) (out SetUp, err error) {
	ids := make([]dsec.SandboxID, n)
	for i := range ids {
		ids[i] = dsec.NewSandboxID(w.Runtime.Node)
	}
	defer func() { err = errors.Join(err, w.Runtime.Drain(context.WithoutCancel(ctx), ids)) }()
	before, err := d.Written(ctx)
	if err != nil {
		return out, err
	}
	var mu sync.Mutex
	var took []time.Duration
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(max(atOnce, 1))
	begin := time.Now()
	for _, id := range ids {
		g.Go(func() error {
			begin := time.Now()
			err := w.one(gctx, id)
			mu.Lock()
			defer mu.Unlock()
			took = append(took, time.Since(begin))
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return out, fmt.Errorf("set up %s: %w", w.Name, err)
	}
	slices.Sort(took)
	out = SetUp{Way: w.Name, N: n, Wall: time.Since(begin), P50: Quantile(took, .5), P99: Quantile(took, .99)}
	after, err := d.Written(ctx)
	if err != nil {
		return out, err
	}
	out.Written = after - before
	for _, id := range ids {
		used, err := d.Used(ctx, id)
		if err != nil {
			return out, err
		}
		out.Each += used / int64(n)
	}
	return out, nil
}

func (w Way) one(ctx context.Context, id dsec.SandboxID) error {
	if err := w.Runtime.Create(ctx, id); err != nil {
		return err
	}
	for _, a := range w.Archive {
		if err := w.unpack(ctx, id, a); err != nil {
			return err
		}
	}
	return w.Runtime.Must(ctx, id, nil)
}

func (w Way) unpack(ctx context.Context, id dsec.SandboxID, archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	r := w.Runtime
	r.Argv = w.Unpack
	return r.Must(ctx, id, f)
}

// SectorsWritten is how many bytes were written to a block device, from its statistics.
func SectorsWritten(device string) (int64, error) {
	text, err := os.ReadFile("/sys/block/" + device + "/stat")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(text))
	if len(f) < 7 {
		return 0, fmt.Errorf("statistics of %s: %q", device, text)
	}
	n, err := strconv.ParseInt(f[6], 10, 64)
	return n * 512, err
}

// LoopOf finds the loop device of a file below a directory.
func LoopOf(dir string) (string, error) {
	all, err := os.ReadDir("/sys/block")
	if err != nil {
		return "", err
	}
	for _, d := range all {
		text, err := os.ReadFile("/sys/block/" + d.Name() + "/loop/backing_file")
		if err == nil && strings.HasPrefix(string(text), dir+"/") {
			return d.Name(), nil
		}
	}
	return "", fmt.Errorf("no loop device of a file in %s", dir)
}
