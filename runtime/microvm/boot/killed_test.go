package boot

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const childConfig = "DSEC_TEST_BOOT_CONFIG"

// TestChildBuilds is the process that the next test kills.
func TestChildBuilds(t *testing.T) {
	text := os.Getenv(childConfig)
	if text == "" {
		t.Skip("it is run by TestABuilderThatIsKilledLeavesNothingHalf")
	}
	var cfg Config
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		t.Fatal(err)
	}
	build(t, cfg)
}

// The moments are in the middle of the package, and a few milliseconds apart
// from its end on, through unpacking and writing.
func TestABuilderThatIsKilledLeavesNothingHalf(t *testing.T) {
	a, cfg := world(t)
	want := build(t, cfg)
	image, initramfs := bytesOf(t, want.Image), bytesOf(t, want.Initramfs)
	killed := 0
	for delay := -1; delay < 40; delay += 4 {
		cfg.Cache = t.TempDir()
		sent := make(chan struct{})
		var once sync.Once
		a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, ".deb") {
				return false
			}
			content := a.File(r.URL.Path)
			w.Header().Set("Content-Length", strconv.Itoa(len(content)))
			half := len(content)
			if delay < 0 {
				half /= 2
			}
			_, _ = w.Write(content[:half])
			_ = http.NewResponseController(w).Flush()
			once.Do(func() { close(sent) })
			if delay < 0 {
				<-r.Context().Done()
			}
			return true
		})
		text, err := json.Marshal(cfg)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestChildBuilds$")
		cmd.Env = append(os.Environ(), childConfig+"="+string(text))
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		<-sent
		time.Sleep(time.Duration(delay) * time.Millisecond) // a moment of its work, whichever that is
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			killed++
		}
		a.Intercept(nil)
		k := build(t, cfg)
		if !k.Pinned || !bytes.Equal(bytesOf(t, k.Image), image) || !bytes.Equal(bytesOf(t, k.Initramfs), initramfs) {
			t.Errorf("killed %d ms after the package: other bytes", delay)
		}
		whole(t, cfg.Cache)
	}
	if killed < 2 {
		t.Errorf("only %d of the builders were killed before their end", killed)
	}
	t.Logf("%d builders were killed before their end", killed)
}
