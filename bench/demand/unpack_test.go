package demand

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/bench"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
)

// archives puts a tar.gz of each image beside the layers, as a registry has them.
func (w *world) archives(t *testing.T) source {
	t.Helper()
	s, err := bucket.Open(t.Context(), w.URL("archives"))
	must(t, err)
	t.Cleanup(func() { s.Close() })
	done := map[string]bool{}
	for _, e := range w.envs {
		for _, name := range e.Layers {
			if done[name] {
				continue
			}
			done[name] = true
			must(t, s.Put(t.Context(), name, zipped(t, filepath.Join(w.dir, name+".tar")), blob.PutOptions{}))
		}
	}
	return func(ctx context.Context, name string) (io.ReadCloser, error) { return s.Open(ctx, name, 0, -1) }
}

// zipped is the tar.gz beside a tar, made once.
func zipped(t *testing.T, path string) *os.File {
	t.Helper()
	if _, err := os.Stat(path + ".gz"); err != nil {
		sh(t, "sh", "-c", `gzip <"$1" >"$1.part" && mv "$1.part" "$1.gz"`, "sh", path)
	}
	f, err := os.Open(path + ".gz")
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// unpacked pulls each archive once, unpacks it on the disk as it comes, and runs
// each command in a container of runc on an overlay of the trees.
func (w *world) unpacked(t *testing.T, archives source, envs []env) outcome {
	d := newDisk(t)
	dropCaches(t)
	end := w.meter(t, &machine{disk: d})
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	var mu sync.Mutex
	var ready, done []time.Duration
	trees := map[string]func() error{}
	for _, e := range envs {
		for _, name := range e.Layers {
			if trees[name] == nil {
				trees[name] = sync.OnceValue(func() error { return pull(ctx, archives, name, filepath.Join(d.dir, "tree", name)) })
			}
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	begin := time.Now()
	for i, e := range envs {
		g.Go(func() error {
			for _, name := range e.Layers {
				if err := trees[name](); err != nil {
					return err
				}
			}
			c := container{dir: filepath.Join(d.dir, fmt.Sprint("c", i)), lower: lower(d.dir, e.Layers)}
			defer c.end()
			err := c.make()
			if err == nil {
				err = c.run(gctx, []string{"/bin/true"})
			}
			first := time.Since(begin)
			if err == nil {
				err = c.run(gctx, e.Argv())
			}
			if err != nil {
				return fmt.Errorf("%s: %w", e.Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			ready, done = append(ready, first), append(done, time.Since(begin))
			return nil
		})
	}
	must(t, g.Wait())
	return end("pulled and unpacked, runc", ready, done)
}

// source opens the tar.gz of an image.
type source func(ctx context.Context, name string) (io.ReadCloser, error)

func pull(ctx context.Context, from source, name, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	r, err := from(ctx, name)
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.CommandContext(ctx, "tar", "-xzf", "-", "-C", to, "--numeric-owner", "--xattrs")
	cmd.Stdin = io.TeeReader(r, sha256.New()) // every client of a registry hashes what it gets
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w: %s", name, err, bytes.TrimSpace(out))
	}
	return nil
}

func lower(dir string, layers []string) string {
	var out []string
	for _, name := range layers {
		out = append([]string{filepath.Join(dir, "tree", name)}, out...)
	}
	return strings.Join(out, ":")
}

// container is one of runc's, on an overlay of its own.
type container struct {
	dir, lower string
	mounted    bool
}

func (c *container) root() string { return filepath.Join(c.dir, "root") }

func (c *container) make() error {
	for _, d := range []string{"root", "up", "work"} {
		if err := os.MkdirAll(filepath.Join(c.dir, d), 0o755); err != nil {
			return err
		}
	}
	opts := fmt.Sprintf("volatile,lowerdir=%s,upperdir=%s/up,workdir=%s/work", c.lower, c.dir, c.dir)
	if err := unix.Mount("overlay", c.root(), "overlay", 0, opts); err != nil {
		return fmt.Errorf("mount overlay %s: %w", c.root(), err)
	}
	c.mounted = true
	return nil
}

func (c *container) run(ctx context.Context, argv []string) error {
	k, err := bench.OCI("runc", c.root(), filepath.Join(c.dir, filepath.Base(argv[0])), argv)
	if err != nil {
		return err
	}
	w, err := k.Worker(0)
	if err != nil {
		return err
	}
	defer w.Close()
	_, err = w.Cycle(ctx, 0)
	return err
}

func (c *container) end() {
	if c.mounted {
		_ = unix.Unmount(c.root(), unix.MNT_DETACH)
	}
}
