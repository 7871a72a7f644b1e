package bucket_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/s3test"
)

// writerURL makes this test binary a writer that never ends.
const writerURL = "DSEC_TEST_WRITER_URL"

func TestMain(m *testing.M) {
	if url := os.Getenv(writerURL); url != "" {
		writeForEver(url)
	}
	os.Exit(m.Run())
}

const sentBeforeTheKill = 40 << 20

func writeForEver(url string) {
	s, err := bucket.Open(context.Background(), url)
	if err == nil {
		err = s.Put(context.Background(), "k", &endless{}, blob.PutOptions{})
	}
	os.Stdout.WriteString("ended: " + err.Error() + "\n")
	os.Exit(1)
}

// endless says when the writer is in the middle, and then gives no more.
type endless struct{ n int64 }

func (e *endless) Read(p []byte) (int, error) {
	if e.n >= sentBeforeTheKill {
		os.Stdout.WriteString("middle\n")
		select {}
	}
	e.n += int64(len(p))
	return len(p), nil
}

// kill starts a writer and kills it in the middle.
func kill(t *testing.T, url string) {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), writerURL+"="+url)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "middle\n" {
		t.Errorf("writer: %q, %v", line, err)
	}
	_ = c.Process.Kill()
	_ = c.Wait() // says that it was killed
}

func TestAKilledWriterChangesNothingAndLeavesNothingForLong(t *testing.T) {
	server := s3test.Start(t)
	dir := t.TempDir()
	for name, c := range map[string]struct {
		url  string
		left func() []string
	}{
		"file": {"file://" + dir, func() []string { return below(t, filepath.Join(dir, ".writing")) }},
		"s3":   {server.URL("p"), func() []string { return uploads(t, server) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, c.url)
			defer s.Close()
			kill(t, c.url)
			if _, err := s.Stat(t.Context(), "k"); !errors.Is(err, dsec.NotFound.Err()) {
				t.Errorf("a key that was being made: %v", err)
			}
			old := []byte("old")
			if err := blob.PutBytes(t.Context(), s, "k", old, blob.PutOptions{}); err != nil {
				t.Fatal(err)
			}
			kill(t, c.url)
			if b, err := blob.ReadAll(t.Context(), s, "k", 100); err != nil || !bytes.Equal(b, old) {
				t.Errorf("a key that was being replaced: %d bytes, %v", len(b), err)
			}
			for i, err := range s.List(t.Context(), "") {
				if err != nil || i.Key != "k" {
					t.Errorf("listed: %+v, %v", i, err)
				}
			}
			if n := len(c.left()); n != 2 {
				t.Fatalf("%d leftovers of 2 writers: the test kills too late", n)
			}
			sweeper := s.(blob.Sweeper)
			if n, err := sweeper.Sweep(t.Context(), time.Hour); n != 0 || err != nil {
				t.Errorf("what is an hour old: %d, %v", n, err)
			}
			if n, err := sweeper.Sweep(t.Context(), -time.Minute); n != 2 || err != nil || len(c.left()) != 0 {
				t.Errorf("swept %d, %v, left %v", n, err, c.left())
			}
			if b, err := blob.ReadAll(t.Context(), s, "k", 100); err != nil || !bytes.Equal(b, old) {
				t.Errorf("after it: %d bytes, %v", len(b), err)
			}
		})
	}
}

func below(t *testing.T, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// A Put that is cancelled takes what it began with it.
func TestACancelledPutLeavesNothing(t *testing.T) {
	server := s3test.Start(t)
	dir := t.TempDir()
	for name, c := range map[string]struct {
		url  string
		left func() []string
	}{
		"file": {"file://" + dir, func() []string { return below(t, filepath.Join(dir, ".writing")) }},
		"s3":   {server.URL("p"), func() []string { return uploads(t, server) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, c.url)
			defer s.Close()
			ctx, cancel := context.WithCancel(t.Context())
			body := io.MultiReader(strings.NewReader(strings.Repeat("x", 30<<20)), cancels(cancel), strings.NewReader(strings.Repeat("y", 30<<20)))
			if err := s.Put(ctx, "k", body, blob.PutOptions{}); !errors.Is(err, dsec.Canceled.Err()) {
				t.Errorf("cancelled: %v", err)
			}
			if left := c.left(); len(left) > 0 {
				t.Errorf("left %v", left)
			}
			if _, err := s.Stat(t.Context(), "k"); !errors.Is(err, dsec.NotFound.Err()) {
				t.Errorf("it is there: %v", err)
			}
		})
	}
}

type cancels context.CancelFunc

func (c cancels) Read([]byte) (int, error) {
	c()
	return 0, io.EOF
}
