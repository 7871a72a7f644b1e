package machine

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/layer"
)

// cli runs the command line and returns its stdout.
func (h *host) cli(args ...string) string {
	h.t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Env = append(os.Environ(), "DSEC_SOCKET="+filepath.Join(h.Dir, "run", "gateway.sock"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		h.t.Fatalf("dsec %v: %v\n%s", args, err, stderr.Bytes())
	}
	return string(out)
}

// TestABuilderSessionBecomesAnEnvironment: what was built in a sandbox becomes
// an image for others by the command line, without the secrets of the builder.
func TestABuilderSessionBecomesAnEnvironment(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(nil)
	secret, answer := fmt.Sprintf("%x", sha256.Sum256([]byte("secret"))), "the expected answer, "+strings.Repeat("long ", 100)
	h.sh(id, fmt.Sprintf(`mkdir -p /root/.ssh /srv; echo %s > /root/.ssh/id_rsa; ln /root/.ssh/id_rsa /srv/link; echo "export T=%s" > /root/.bash_history
		printf %%s '%s' > /srv/answer; echo built > /srv/tool; echo %s > /srv/gone; rm /srv/gone; mkdir -p /root/.cache/%s`, secret, secret, answer, secret, secret))
	var packed dsec.Packed
	file := filepath.Join(t.TempDir(), "answer")
	if err := os.WriteFile(file, []byte(answer), 0o600); err != nil {
		t.Fatal(err)
	}
	out := h.cli("commit", string(id), "env:1", "--scrub", "all", "--scrub-answer", "@"+file, "-o", "json")
	if err := json.Unmarshal([]byte(out), &struct {
		Digest *string            `json:"digest"`
		Report **dsec.ScrubReport `json:"report"`
	}{&packed.Digest, &packed.Report}); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if packed.Report == nil || packed.Report.RemovedCount != 5 {
		t.Errorf("report %+v", packed.Report)
	}
	eventually(t, "the layer is in the blob store", func() bool {
		_, err := os.Stat(filepath.Join(h.Dir, "data", "blobs", layer.ManifestKey(layer.Digest(packed.Digest))))
		return err == nil
	})
	hexDigest := strings.TrimPrefix(packed.Digest, "sha256:")
	for _, dir := range []string{filepath.Join("layers", "layers", hexDigest), "blobs"} {
		wantNowhere(t, filepath.Join(h.Dir, "data", dir), secret, answer)
	}
	if text := h.cli("image", "inspect", "env:1"); !strings.Contains(text, string(id)) || !strings.Contains(text, packed.Report.Digest()) {
		t.Errorf("inspect:\n%s", text)
	}
	if out, _ := h.sh(id, "cat /srv/answer /root/.ssh/id_rsa"); !strings.Contains(out, secret) {
		t.Errorf("the builder lost its files: %q", out)
	}
	h.cli("template", "create", "task:1", "--image", "env:1")
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			sb, err := h.Create(t.Context(), dsec.Spec{Tier: kind.Tier, Isolation: kind.Isolation, Image: "task:1", Limits: dsec.Limits{Memory: 64 << 20, Disk: 32 << 20, Pids: 32}})
			if err != nil {
				t.Error(err)
				return
			}
			if out, r := h.sh(sb.ID, "cat /srv/tool; ls /srv /root/.ssh"); r.ExitCode != 0 || !strings.HasPrefix(out, "built\n") || strings.Contains(out, "link") {
				t.Errorf("%q %+v", out, r)
			}
		})
	}
	wg.Wait()
}

// wantNowhere looks for texts in every file below a directory, as it is and with
// what of it is compressed unpacked.
func wantNowhere(t *testing.T, dir string, texts ...string) {
	t.Helper()
	z, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	files, unpacked := 0, 0
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files++
		if plain, err := z.DecodeAll(b, nil); err == nil { // a pack is one frame after the other
			b = append(b, plain...)
			unpacked++
		}
		for _, s := range texts {
			if bytes.Contains(b, []byte(s)) {
				t.Errorf("%s holds %.20s", path, s)
			}
		}
		return nil
	})
	if err != nil || files < 3 {
		t.Errorf("%d files of %s: %v", files, dir, err)
	}
	t.Logf("%d files of %s, %d of them unpacked", files, dir, unpacked)
}

// TestAFailedRolloutIsOpenedAfterwards by the command line, after the agent was
// killed and started again, and the sandbox is gone.
func TestAFailedRolloutIsOpenedAfterwards(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := dsec.SandboxID(strings.TrimSpace(h.cli("create", "box", "--keep-on-failure", "24h", "--memory", "64MiB", "--disk", "64MiB")))
	h.sh(id, "echo clue > /root/clue; rm /root/none; echo more >> /etc/passwd")
	live := h.cli("diff", string(id))
	for _, want := range []string{"A /root/clue", "M /etc/passwd"} {
		if !strings.Contains(live, want) {
			t.Errorf("no %q in\n%s", want, live)
		}
	}
	if out := h.cli("debug", string(id), "--", "/bin/cat", "/root/clue"); out != "clue\n" {
		t.Errorf("debug of a live one: %q", out)
	}
	h.cli("stop", string(id), "--cause", "agent_error")
	h.Kill("node")
	h.Await("dsec is up", 1)
	eventually(t, "the agent answers", func() bool { _, err := h.Get(t.Context(), id); return err == nil })
	h.cli("rm", string(id))
	sb, err := h.Get(t.Context(), id)
	if err != nil || sb.Kept == nil || sb.State != dsec.Deleted {
		t.Fatalf("%+v %v", sb.Kept, err)
	}
	if kept := h.cli("diff", string(id)); kept != live {
		t.Errorf("diff of what was kept:\n%s\nwant\n%s", kept, live)
	}
	if out := h.cli("debug", string(id), "--", "/bin/sh", "-c", "cat /root/clue; ls /sys/class/net 2>/dev/null; cat /proc/net/dev | grep -c :"); out != "clue\n1\n" {
		t.Errorf("debug of what was kept: %q", out)
	}
	all, _, err := h.List(t.Context(), client.ListOptions{})
	if err != nil || len(all) != 0 {
		t.Errorf("left %v %v", all, err)
	}
}
