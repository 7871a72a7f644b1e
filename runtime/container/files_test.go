package container

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

func (w *world) files(t *testing.T, id dsec.SandboxID, user string) files.FS {
	t.Helper()
	fs, err := w.r.Files(t.Context(), id, user)
	must(t, err)
	return fs
}

func TestFilesOfARunningAndThenAStoppedSandbox(t *testing.T) {
	everyPlan(t, func(t *testing.T, w *world) {
		id := w.create(t)
		w.want(t, id, "echo artifact > /root/out; chmod 600 /root/out", "")
		root, user := w.files(t, id, ""), w.files(t, id, "user")
		var b bytes.Buffer
		if _, err := root.Read(t.Context(), "/root/out", 0, -1, &b); err != nil || b.String() != "artifact\n" {
			t.Errorf("%q %v", b.String(), err)
		}
		if _, err := user.Read(t.Context(), "/root/out", 0, -1, &b); !errors.Is(err, dsec.PermissionDenied.Err()) {
			t.Errorf("as user: %v", err)
		}
		i, err := user.Write(t.Context(), "/home/user/f", strings.NewReader("x"), files.WriteOptions{})
		if err != nil || i.UID != 1000 {
			t.Errorf("%+v %v", i, err)
		}
		must(t, w.r.Stop(t.Context(), id, 0))
		b.Reset()
		if _, err := root.Read(t.Context(), "/root/out", 0, -1, &b); err != nil || b.String() != "artifact\n" {
			t.Errorf("after the stop: %q %v", b.String(), err)
		}
		_, err = root.Write(t.Context(), "/root/later", strings.NewReader("later"), files.WriteOptions{})
		must(t, err)
		w.pack(t, id) // takes the disk away for a moment
		if _, err := root.Stat(t.Context(), "/root/later", false); err != nil {
			t.Errorf("after the packing: %v", err)
		}
		_, err = w.r.Start(t.Context(), id)
		must(t, err)
		w.want(t, id, "cat /root/later /home/user/f", "laterx")
		if _, err := root.Stat(t.Context(), "/root/later", false); err != nil {
			t.Errorf("after the start: %v", err)
		}
		must(t, w.r.Destroy(t.Context(), id))
		if _, err := root.Stat(t.Context(), "/root", false); !errors.Is(err, dsec.SandboxGone.Err()) {
			t.Errorf("after the end: %v", err)
		}
		w.wantNothing(t)
	})
}

func TestDestroyEndsFileCallsInFlight(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	fs := w.files(t, id, "")
	stuck := &stuckReader{begun: make(chan struct{}), end: make(chan struct{})}
	defer close(stuck.end)
	ended := make(chan error, 1)
	go func() {
		_, err := fs.Write(context.Background(), "/f", stuck, files.WriteOptions{})
		ended <- err
	}()
	select {
	case <-stuck.begun:
	case err := <-ended:
		t.Fatal(err)
	}
	must(t, w.r.Destroy(t.Context(), id))
	select {
	case err := <-ended:
		if !errors.Is(err, dsec.SandboxGone.Err()) {
			t.Errorf("%v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the write hangs")
	}
}

// stuckReader never gives a byte.
type stuckReader struct {
	once       sync.Once
	begun, end chan struct{}
}

func (s *stuckReader) Read([]byte) (int, error) {
	s.once.Do(func() { close(s.begun) })
	<-s.end
	return 0, errors.New("the test is over")
}

func TestFileHelpersAreNoneOfTheSandboxsProcesses(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	fs := w.files(t, id, "")
	_, err := fs.Stat(t.Context(), "/", false)
	must(t, err)
	w.want(t, id, "ps | grep -c [h]old-files || true", "0\n")
	s, err := w.r.Stats(t.Context(), id)
	must(t, err)
	if s.Pids != 1 {
		t.Errorf("%d processes are charged to it", s.Pids)
	}
}
