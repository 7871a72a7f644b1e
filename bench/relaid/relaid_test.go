// Package relaid measures what a trace and data in its order save: a program is
// run in a layer, what it touched is recorded, the layer is repacked, the program
// is run again, and what a node would have fetched for each is compared.
//
// DSEC_RELAID_IMAGES is the directory of the tars that bench/images/build.sh
// makes, DSEC_RELAID_RUNS a file like bench/images/runs.txt. It needs root.
package relaid

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
	"github.com/opendsec/dsec/layer/resident"
	"github.com/opendsec/dsec/layer/store"
)

// goal is fetched over touched bytes with a trace and data in its order.
const goal = 1.5

func TestFetchedBytesOfARepackedLayer(t *testing.T) {
	dir, runs := os.Getenv("DSEC_RELAID_IMAGES"), os.Getenv("DSEC_RELAID_RUNS")
	if dir == "" || runs == "" {
		t.Skipf("DSEC_RELAID_IMAGES is %q, DSEC_RELAID_RUNS %q: no images to measure with", dir, runs)
	}
	f, err := os.Open(runs)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	t.Log("| program | touched MiB | as imported: fetched / touched | GETs | compressed MiB | repacked: fetched / touched | GETs | compressed MiB | missed KiB | metadata |")
	for s := bufio.NewScanner(f); s.Scan(); {
		cols := strings.SplitN(s.Text(), " | ", 3)
		if len(cols) != 3 || strings.HasPrefix(cols[0], "#") {
			continue
		}
		t.Run(strings.ReplaceAll(cols[0], ",", ""), func(t *testing.T) { measure(t, dir, cols[0], strings.Fields(cols[1]), cols[2]) })
	}
}

func measure(t *testing.T, images, name string, layers []string, command string) {
	ctx, dir := context.Background(), t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "blobs"), 0o700); err != nil {
		t.Fatal(err)
	}
	blobs, err := bucket.Open(ctx, "file://"+filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	s, err := store.Open(filepath.Join(dir, "store"), store.Options{Blobs: blobs})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var refs []dsec.LayerRef
	for i, l := range layers {
		info, err := s.Import(ctx, filepath.Join(images, l+".tar"), "", image.Options{KeepWhiteouts: i > 0})
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, dsec.LayerRef(info.Digest))
	}
	first := touched(t, s, refs, command)
	before := fetched(t, blobs, dir, aheadOf(first), first)
	traces, grown := map[layer.Digest][]layer.Range{}, ""
	for i, d := range refs {
		tr := layer.TraceOf(layer.Digest(d), time.Minute, first[layer.Digest(d)], false)
		if len(tr.Pieces) == 0 {
			continue
		}
		was, err := s.Inspect(ctx, d)
		if err != nil {
			t.Fatal(err)
		}
		info, err := s.Repack(ctx, d, tr)
		if err != nil {
			t.Fatal(err)
		}
		grown += fmt.Sprintf("+%.1f %%, ", 100*(float64(info.MetaSize)/float64(was.MetaSize)-1))
		if tr, err = s.Trace(ctx, info.Digest); err != nil {
			t.Fatal(err)
		}
		refs[i], traces[info.Digest] = dsec.LayerRef(info.Digest), tr.Ahead()
	}
	second := touched(t, s, refs, command)
	after := fetched(t, blobs, dir, traces, second)
	wanted, again := float64(total(first)), float64(total(second))
	x, mib := float64(after.plain)/again, float64(1<<20)
	t.Logf("| %-22s | %5.0f | %.2f | %3d | %5.1f | %.2f | %3d | %5.1f | %6.0f | %s |", name, wanted/mib, float64(before.plain)/wanted, before.requests,
		float64(before.compressed)/mib, x, after.requests, float64(after.compressed)/mib, float64(after.missed)/1024, grown)
	if x > goal {
		t.Errorf("%s: %.2f times what was touched is fetched, the goal is %.1f", name, x, goal)
	}
}

// aheadOf is what a trace of one recording would have fetched.
func aheadOf(touched map[layer.Digest][]layer.Range) map[layer.Digest][]layer.Range {
	out := map[layer.Digest][]layer.Range{}
	for d, ranges := range touched {
		out[d] = layer.TraceOf(d, time.Minute, ranges, false).Ahead()
	}
	return out
}

// touched runs a command on a stack of layers of which nothing is in memory, and
// says what of each then is.
func touched(t *testing.T, s *store.Store, refs []dsec.LayerRef, command string) map[layer.Digest][]layer.Range {
	t.Helper()
	set, err := s.Acquire(context.Background(), "run", refs)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Release(context.Background(), "run"); err != nil {
			t.Error(err)
		}
	}()
	out, lower := map[layer.Digest][]layer.Range{}, []string{}
	var roots []*os.File
	for _, l := range set.Layers {
		dir := t.TempDir()
		if err := unix.Mount(l.Meta, dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, "device="+l.Data); err != nil {
			t.Fatal(err)
		}
		root, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			root.Close()
			if err := unix.Unmount(dir, 0); err != nil {
				t.Error("unmount:", err)
			}
		}()
		roots, lower = append(roots, root), append([]string{dir}, lower...)
	}
	run(t, lower, command)
	for i, l := range set.Layers {
		meta, err := os.Open(l.Meta)
		if err != nil {
			t.Fatal(err)
		}
		im, err := erofs.Open(meta, l.MetaSize, nil)
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if out[l.Digest], err = resident.Of(roots[i], im); err != nil {
			t.Fatal(err)
		}
		t.Logf("looked at %d inodes in %s", im.Inodes(), time.Since(begin))
		meta.Close()
	}
	return out
}

// run executes the command in a root of its own namespaces.
func run(t *testing.T, lower []string, command string) {
	t.Helper()
	up := t.TempDir()
	script := `set -e
mount -t tmpfs none "$1"; mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=$2,upperdir=$1/up,workdir=$1/work" "$1/root"
mkdir -p "$1/root/proc" "$1/root/dev" "$1/root/tmp"
mount -t proc none "$1/root/proc"; mount --rbind /dev "$1/root/dev"; mount -t tmpfs none "$1/root/tmp"
exec chroot "$1/root" /bin/sh -c "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; $3"`
	cmd := exec.Command("unshare", "-mpfn", "--propagation", "private", "sh", "-c", script, "sh", up, strings.Join(lower, ":"), command)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/tmp", "LANG=C"}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out[max(0, len(out)-2000):])
	}
}

// cost of what a node that has nothing fetches.
type cost struct {
	plain, compressed, requests int64
	missed                      int64 // bytes touched that were not fetched ahead
}

// fetched is what a node fetches if it prefetches the one and then reads the
// other: the chunks that lack, without running ahead of a reader.
func fetched(t *testing.T, blobs blob.Store, dir string, ahead, reads map[layer.Digest][]layer.Range) (sum cost) {
	t.Helper()
	for d, ranges := range reads {
		if len(ranges) == 0 {
			continue
		}
		l, ix := open(t, blobs, dir, d)
		if err := l.Prefetch(context.Background(), ahead[d]); err != nil {
			t.Fatal(err)
		}
		st := l.Stats()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		sum.plain, sum.compressed, sum.requests = sum.plain+st.Plain, sum.compressed+st.Fetched, sum.requests+st.Requests
		offs, here := ix.Offsets(), map[int]bool{}
		for _, r := range ahead[d] {
			for from, to := layer.Span(offs, r.Off, r.Len); from < to; from++ {
				here[from] = true
			}
		}
		for _, r := range ranges {
			for from, to := layer.Span(offs, r.Off, r.Len); from < to; from++ {
				if c := ix.Chunks[from]; !here[from] {
					here[from] = true
					sum.plain, sum.compressed, sum.requests = sum.plain+int64(c.Size), sum.compressed+int64(c.Length), sum.requests+1
					sum.missed += min(r.Off+r.Len, offs[from+1]) - max(r.Off, offs[from])
				}
			}
		}
	}
	return sum
}

func open(t *testing.T, blobs blob.Store, dir string, d layer.Digest) (*ondemand.Layer, layer.Index) {
	t.Helper()
	ctx := context.Background()
	raw, err := blob.ReadAll(ctx, blobs, layer.ManifestKey(d), layer.MaxManifest)
	if err != nil {
		t.Fatal(err)
	}
	m, err := layer.DecodeManifest(raw, d)
	if err != nil {
		t.Fatal(err)
	}
	if raw, err = blob.ReadAll(ctx, blobs, layer.IndexKey(m.Data.Chunks), layer.MaxIndex); err != nil {
		t.Fatal(err)
	}
	ix, err := layer.DecodeIndex(raw, m.Data)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.Create(filepath.Join(dir, "fetched"))
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, fmt.Sprintf("present-%s", d.Hex()[:12]))
	os.Remove(name) // of a run before
	if err := layer.CreatePresence(name, len(ix.Chunks)); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	present, err := layer.OpenPresence(f, len(ix.Chunks))
	if err != nil {
		t.Fatal(err)
	}
	l, err := ondemand.Open(ondemand.Parts{Digest: d, Index: ix, Data: data, Present: present}, ondemand.Options{Blobs: blobs})
	if err != nil {
		t.Fatal(err)
	}
	return l, ix
}

func total(all map[layer.Digest][]layer.Range) (n int64) {
	for _, ranges := range all {
		for _, r := range ranges {
			n += r.Len
		}
	}
	return n
}
