package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/blob/s3test"
)

// TestWhoMayHaveSeenAnErrorOfALayerEndsInfraImage: by both mechanisms, over a
// restart of the agent and of the loader, and nobody else does.
func TestWhoMayHaveSeenAnErrorOfALayerEndsInfraImage(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"fuse", "pre-content"} {
		t.Run(how, func(t *testing.T) {
			needs(t, how)
			storeBreaks(t, how)
		})
	}
}

// onObjects is a machine with a layer that lies in a real S3 server, whose keys
// are in a file.
func onObjects(t *testing.T, how string, files int) (*host, dsec.LayerRef, *s3test.Server) {
	t.Helper()
	server := s3test.Start(t)
	h, ref := onDemand(t, how, server.URL("dsec"), randomTree(t, files))
	return h, ref, server
}

func (h *host) with(ref dsec.LayerRef) dsec.SandboxID {
	return h.create(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{ref} })
}

func (h *host) blamed(id dsec.SandboxID) bool {
	h.t.Helper()
	sb, err := h.Get(h.t.Context(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	return sb.Blame != nil && sb.Blame.Cause == dsec.CauseInfraImage && len(sb.Blame.Evidence) > 0
}

// deleted deletes a sandbox and says how it ended.
func (h *host) deleted(id dsec.SandboxID) dsec.Result {
	h.t.Helper()
	if _, err := h.Delete(h.t.Context(), id); err != nil {
		h.t.Fatal(err)
	}
	sb, err := h.Get(h.t.Context(), id)
	if err != nil || sb.Result == nil {
		h.t.Fatalf("%+v, %v", sb, err)
	}
	return *sb.Result
}

func storeBreaks(t *testing.T, how string) {
	h, ref, server := onObjects(t, how, 300)
	ctx := t.Context()
	reader, neighbour, other := h.with(ref), h.with(ref), h.create(nil)
	if out, r := h.sh(reader, "head -c 100 /data/sums >/dev/null"); r.ExitCode != 0 || r.Blame != "" {
		t.Fatalf("before: %s, %+v", out, r)
	}
	server.Proxy.Set(fault.Faults{Mode: fault.Forbidden})
	out, r := h.sh(reader, "cat /data/*/* >/dev/null")
	if r.ExitCode == 0 || !strings.Contains(out, "Input/output error") || r.Blame != dsec.CauseInfraImage {
		t.Errorf("a command that could not read: %+v, %.300s", r, out)
	}
	if _, r := h.sh(other, "false"); r.Blame != "" || h.blamed(other) {
		t.Errorf("a sandbox without the layer: %+v", r)
	}
	server.Proxy.Set(fault.Faults{})
	h.Kill("loader")
	h.Kill("node")
	for _, id := range []dsec.SandboxID{reader, neighbour} {
		eventually(t, "the next agent answers", func() bool { _, err := h.Get(ctx, id); return err == nil })
		if !h.blamed(id) {
			t.Errorf("%s is not blamed on anything", id)
		}
		if out, err := h.follow(ctx, id, reading); err != nil || out != "read 300\n" {
			t.Errorf("it goes on when the store is back: %q, %v", out, err)
		}
	}
	if res := h.deleted(neighbour); res.Cause != dsec.CauseInfraImage || !res.Mask() || !res.Retryable {
		t.Errorf("who may have seen it: %+v", res)
	}
	if sb, err := h.Stop(ctx, reader, dsec.CauseAgentError); err != nil || sb.Result.Cause != dsec.CauseInfraImage ||
		!strings.Contains(strings.Join(sb.Result.Evidence, "\n"), string(ref)) {
		t.Errorf("who has seen it: %+v, %v", sb.Result, err)
	}
	later := h.with(ref)
	if out, err := h.follow(ctx, later, reading); err != nil || out != "read 300\n" {
		t.Errorf("a sandbox that was made since: %q, %v", out, err)
	}
	for _, id := range []dsec.SandboxID{later, other} {
		if res := h.deleted(id); res.Cause != dsec.CauseCompleted {
			t.Errorf("who has seen nothing: %+v", res)
		}
	}
}

// TestAnOutageIsWaitedThrough: what reads while object storage is away for some
// seconds waits and reads, and nobody is blamed.
func TestAnOutageIsWaitedThrough(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"fuse", "pre-content"} {
		t.Run(how, func(t *testing.T) {
			needs(t, how)
			h, ref, server := onObjects(t, how, 300)
			id := h.with(ref)
			server.Proxy.Set(fault.Faults{Mode: fault.Unavailable})
			asked, begun := server.Proxy.Requests(), time.Now()
			read := make(chan error, 1)
			go func() {
				out, err := h.follow(t.Context(), id, reading)
				if err == nil && out != "read 300\n" {
					err = errors.New(out)
				}
				read <- err
			}()
			// Longer than anybody asks who does not wait for the end of it.
			eventually(t, "it is asked for again and again", func() bool { return server.Proxy.Requests() > asked+4 && time.Since(begun) > 3*time.Second })
			server.Proxy.Set(fault.Faults{})
			if err := <-read; err != nil {
				t.Errorf("over an outage: %v", err)
			}
			if res := h.deleted(id); res.Cause != dsec.CauseCompleted {
				t.Errorf("%+v", res)
			}
		})
	}
}

// TestALostMountIsNotUsedAgain: a FUSE connection that somebody aborts is of no
// use to anybody any more. Who has the mount ends infra_image, who comes reads
// all.
func TestALostMountIsNotUsedAgain(t *testing.T) {
	h, ref, _ := onObjects(t, "fuse", 300)
	had := h.with(ref)
	if out, r := h.sh(had, "head -c 100 /data/sums >/dev/null"); r.ExitCode != 0 {
		t.Fatalf("%s, %+v", out, r)
	}
	h.abort(h.demand(ref).DataSize)
	eventually(t, "it is noted that a mount is lost", func() bool { return h.blamed(had) })
	if out, r := h.sh(had, "cat /data/*/* >/dev/null"); r.ExitCode == 0 || r.Blame != dsec.CauseInfraImage {
		t.Errorf("through a mount that is lost: %+v, %.300s", r, out)
	}
	fresh := h.with(ref)
	if out, err := h.follow(t.Context(), fresh, reading); err != nil || out != "read 300\n" {
		t.Errorf("who came since: %q, %v", out, err)
	}
	if res := h.deleted(fresh); res.Cause != dsec.CauseCompleted {
		t.Errorf("who came since: %+v", res)
	}
	if res := h.deleted(had); res.Cause != dsec.CauseInfraImage {
		t.Errorf("who had it: %+v", res)
	}
}

// abort ends the FUSE connection by which data of that size come, which the agent
// has open.
func (h *host) abort(size int64) {
	h.t.Helper()
	at := h.t.TempDir()
	if err := unix.Mount("none", at, "fusectl", 0, ""); err != nil {
		h.t.Fatal(os.NewSyscallError("mount fusectl", err))
	}
	defer func() {
		if err := unix.Unmount(at, 0); err != nil {
			h.t.Error(err)
		}
	}()
	open, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", h.Child("node")))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, f := range open {
		var st unix.Stat_t
		if unix.Stat(f, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != size || unix.Major(st.Dev) != 0 {
			continue
		}
		way := filepath.Join(at, strconv.Itoa(int(unix.Minor(st.Dev))), "abort")
		if err := os.WriteFile(way, []byte("1"), 0); err != nil {
			h.t.Fatal(err)
		}
		return
	}
	h.t.Fatalf("the agent has nothing open that has %d bytes", size)
}

// TestWhatLayersMayTakeIsEnough: with room for next to nothing every byte is read,
// and next to nothing is kept.
func TestWhatLayersMayTakeIsEnough(t *testing.T) {
	t.Parallel()
	h, ref, _ := onObjects(t, "fuse, layer_cache: 1MiB", 300)
	id := h.with(ref)
	for range 2 {
		if out, err := h.follow(t.Context(), id, reading); err != nil || out != "read 300\n" {
			t.Fatalf("%q, %v", out, err)
		}
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	if d := h.demand(ref); d.Here*4 > d.Chunks || d.Failures > 0 {
		t.Errorf("kept: %+v", d)
	}
	if says := h.demandChecks(); !strings.Contains(says, " uncached reads of ") {
		t.Errorf("doctor says %q", says)
	}
	text := h.counts()
	for _, want := range []string{"dsec_layer_uncached_reads_total ", `dsec_blob_read_bytes_total{by="loader"} `, `dsec_blob_written_bytes_total{by="agent"} `} {
		if _, n, _ := strings.Cut(text, "\n"+want); n == "" || n[0] < '1' || n[0] > '9' {
			t.Errorf("no %sin the metrics, or 0:\n%s", want, text)
		}
	}
	if res := h.deleted(id); res.Cause != dsec.CauseCompleted {
		t.Errorf("%+v", res)
	}
}
