package machine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
	"github.com/opendsec/dsec/process"
)

// randomTree is a tar of files of random bytes below /data, and /data/sums,
// which says what they are.
func randomTree(t *testing.T, files int) []byte {
	t.Helper()
	var out, sums bytes.Buffer
	w := tar.NewWriter(&out)
	r := rand.NewChaCha8([32]byte{1})
	sizes := rand.New(r)
	add := func(name string, b []byte) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(b)), Format: tar.FormatPAX}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	for i := range files {
		b := make([]byte, 1+sizes.IntN(1<<sizes.IntN(21)))
		_, _ = r.Read(b)
		name := fmt.Sprintf("%d/%d", i%7, i)
		add("data/"+name, b)
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(b), name)
	}
	add("data/sums", sums.Bytes())
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// reading compares every file with its sum, in an order of its own, and says
// for each that cannot be read, or is not what it was.
const reading = `cd /data && shuf sums >/tmp/order && n=0
while read -r sum name; do
  if got=$(sha256sum "$name" 2>/dev/null); then
    [ "${got%% *}" = "$sum" ] || echo "WRONG $name"
  else echo "EIO $name"; fi
  n=$((n+1)); usleep 3000
done </tmp/order
echo "read $n"`

// onDemand makes a layer in a blob store that another machine has put there, so
// that this one has none of its data.
func onDemand(t *testing.T, how, blobs string, tree []byte) (*host, dsec.LayerRef) {
	t.Helper()
	place := func() string {
		dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	one := startWith(t, place(), "blobs: "+blobs+"\n")
	l, err := one.UploadTree(t.Context(), bytes.NewReader(tree), client.BuildOptions{Tag: "data"})
	if err != nil {
		t.Fatal(err)
	}
	one.Down()
	return startWith(t, place(), "blobs: "+blobs+"\n", "on_demand: "+how), dsec.LayerRef(l.Digest)
}

// TestKilledWhileReading kills loader and agent while sandboxes read a layer
// that is not there yet: every byte is right, and none is missing. Then it kills
// the hold, alone and with the others, and what comes after reads the same layer.
func TestKilledWhileReading(t *testing.T) {
	t.Parallel()
	server := s3test.Start(t)
	for _, how := range []string{"fuse", "pre-content"} {
		for store, blobs := range map[string]string{
			"files": "file://" + filepath.Join(t.TempDir(), "blobs"),
			"S3":    fmt.Sprintf("s3://%s/%s?endpoint=%s&credentials=%s", s3test.BucketName, how, server.Endpoint(), server.CredentialsFile()),
		} {
			t.Run(how+" from "+store, func(t *testing.T) {
				t.Parallel()
				needs(t, how)
				killWhileReading(t, how, blobs)
			})
		}
	}
}

// needs skips a test of a mechanism that this kernel does not have, or that is left to the long run.
func needs(t *testing.T, how string) {
	t.Helper()
	if how != "pre-content" {
		return
	}
	if !long {
		t.Skip("one of two ways is enough for whole machines: DSEC_LONG is not set")
	}
	if err := precontent.Supported("/var/tmp"); err != nil {
		t.Skip(err)
	}
}

func killWhileReading(t *testing.T, how, blobs string) {
	h, ref := onDemand(t, how, blobs, randomTree(t, 600))
	defer func() {
		if t.Failed() {
			t.Logf("what dsec up had to say:\n%s", h.Log.Worth())
		}
	}()
	length := 12 * time.Second
	if long {
		length = 10 * time.Minute
	}
	ctx, cancel := context.WithTimeout(t.Context(), length+5*time.Minute)
	defer cancel()
	end := time.Now().Add(length)
	r := readers{h: h, ref: ref}
	r.start(ctx, 3, func() bool { return time.Now().After(end) })
	kills := 0
	for time.Now().Before(end) {
		time.Sleep(time.Duration(rand.IntN(800)) * time.Millisecond)
		switch rand.IntN(4) {
		case 0:
			h.Kill("node")
		case 1:
			h.Kill("node", "loader")
		default:
			h.Kill("loader")
		}
		kills++
	}
	r.work.Wait()
	if len(r.wrong) > 0 {
		t.Log(r.wrong)
		t.Errorf("%d things are wrong, the first: %s", len(r.wrong), r.wrong[0])
	}
	if r.whole == 0 || kills == 0 {
		t.Errorf("%d whole readings, %d kills", r.whole, kills)
	}
	t.Logf("%d whole readings of 600 files, %d kills", r.whole, kills)
	all := [][]string{{"hold"}, {"node", "hold", "loader"}}
	if long {
		all = append(all, []string{"loader", "hold"}, []string{"node", "hold"})
	}
	for _, names := range all {
		h.killAtOnce(ctx, ref, names)
	}
}

// readers compare every file of a layer with its sum, again and again.
type readers struct {
	h    *host
	ref  dsec.LayerRef
	work sync.WaitGroup

	mu    sync.Mutex
	ids   []dsec.SandboxID
	whole int                     // readings of all files
	wrong []string                // what was not as it should be
	bytes map[dsec.SandboxID]bool // sandboxes that saw a wrong byte
}

// start has n sandboxes read until the end, or an error.
func (r *readers) start(ctx context.Context, n int, over func() bool) {
	r.h.t.Helper()
	r.bytes = map[dsec.SandboxID]bool{}
	for range n {
		id := r.h.create(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{r.ref} })
		r.ids = append(r.ids, id)
		r.work.Go(func() {
			for !over() && r.read(ctx, id) {
				if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0); err != nil {
					r.h.t.Errorf("drop caches: %v", err)
				}
			}
		})
	}
}

func (r *readers) read(ctx context.Context, id dsec.SandboxID) (goOn bool) {
	out, err := r.h.follow(ctx, id, reading)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.wrong = append(r.wrong, err.Error())
	}
	for _, l := range strings.Split(out, "\n") {
		if strings.HasPrefix(l, "WRONG") || strings.HasPrefix(l, "EIO") {
			r.wrong = append(r.wrong, l)
			r.bytes[id] = r.bytes[id] || strings.HasPrefix(l, "WRONG")
		}
	}
	if strings.Contains(out, "read 600") {
		r.whole++
	}
	return err == nil
}

// killAtOnce kills the hold, and others, while sandboxes read what is not there.
// They end with it, and put it down to the platform; who comes then reads nothing
// but what is right.
func (h *host) killAtOnce(ctx context.Context, ref dsec.LayerRef, names []string) {
	h.t.Helper()
	for id := range h.states(ctx) {
		if _, err := h.Delete(ctx, id); err != nil {
			h.t.Fatal(err)
		}
	}
	if _, err := h.EvictLayer(ctx, ref); err != nil {
		h.t.Fatal(err)
	}
	r := readers{h: h, ref: ref}
	r.start(ctx, 3, func() bool { return false }) // until they are gone
	eventually(h.t, "data to come", func() bool { return h.demand(ref).Here > 2 })
	var pids []int
	for _, name := range names {
		if name == "hold" {
			pids = append(pids, h.holdPID())
		} else {
			pids = append(pids, h.Child(name))
		}
	}
	rand.Shuffle(len(pids), func(i, j int) { pids[i], pids[j] = pids[j], pids[i] })
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			h.t.Fatal(err)
		}
	}
	r.work.Wait()
	var id dsec.SandboxID
	eventually(h.t, fmt.Sprintf("a sandbox after %v were killed", names), func() bool {
		sb, err := h.Create(ctx, dsec.Spec{Tier: kind.Tier, Isolation: kind.Isolation, Image: "box", Layers: []dsec.LayerRef{ref},
			Limits: dsec.Limits{CPU: 1, Memory: 128 << 20, Pids: 64, Disk: 64 << 20}})
		id = sb.ID
		if err != nil {
			h.t.Logf("after %v were killed: %v", names, err)
		}
		return err == nil
	})
	if out, err := h.follow(ctx, id, reading); err != nil || out != "read 600\n" {
		h.t.Errorf("after %v were killed: %q, %v", names, out, err)
	}
	for _, id := range r.ids {
		sb, err := h.Get(ctx, id)
		if err != nil || sb.Result == nil || !strings.HasPrefix(string(sb.Result.Cause), "infra_") {
			h.t.Errorf("after %v were killed: a reader ended %+v, %v", names, sb.Result, err)
		}
		if r.bytes[id] {
			h.t.Logf("after %v were killed: a sandbox that was ending saw a wrong byte", names)
		}
	}
}

// follow runs a script and follows it over whatever is killed.
func (h *host) follow(ctx context.Context, id dsec.SandboxID, script string) (string, error) {
	s := process.Spec{ID: "r" + dsec.Random(8), Argv: []string{"/bin/sh", "-c", script}}
	var p *client.Process
	for {
		var err error
		if p, err = h.Exec(ctx, id, s); err == nil {
			break
		}
		if ctx.Err() != nil || !dsec.ClassOf(err).Retryable() {
			return "", fmt.Errorf("exec: %w", err)
		}
	}
	var out bytes.Buffer
	for {
		r, err := p.Follow(ctx, client.Offsets{Stdout: int64(out.Len())}, func(c client.Chunk) error {
			if c.Stream == process.Stdout {
				out.Write(c.Data)
			}
			return nil
		})
		switch {
		case err != nil && dsec.ClassOf(err).Retryable() && ctx.Err() == nil: // killed while we listened
		case err != nil:
			return out.String(), fmt.Errorf("follow: %w", err)
		case r.ExitCode != 0 || r.Status != process.Exited:
			return out.String(), fmt.Errorf("script: %+v, %q", r, out.String())
		default:
			return out.String(), nil
		}
	}
}
