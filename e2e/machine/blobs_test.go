package machine

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/runtime"
)

// The credentials come by the environment of dsec up, reach the agent, and
// nobody else: neither the gateway, nor the hold and what it starts, nor a log.
func TestObjectStorageOnS3(t *testing.T) {
	server := s3test.Start(t)
	credentials(t, server)
	dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	place := "s3://" + s3test.BucketName + "/dsec"
	h := startWith(t, dir, fmt.Sprintf("blobs: %s?endpoint=%s\n", place, server.Endpoint()))
	if c := h.objectStorage(); !c.OK || !strings.Contains(c.Detail, place) || !strings.Contains(c.Detail, "wrote, read and deleted") {
		t.Errorf("doctor: %+v", c)
	}
	id := h.create(nil)
	inside, _ := h.sh(id, "cat /proc/1/environ /proc/self/environ")
	for what, text := range map[string]string{"the gateway": environ(t, h.Child("gateway")), "the hold": environ(t, h.holdPID()), "a sandbox": inside,
		"the log": h.Log.String(), "the hold's log": read(t, h.Dir+"/data/hold.log")} {
		if strings.Contains(text, server.SecretKey) || strings.Contains(text, server.AccessKey) {
			t.Errorf("%s has the credentials", what)
		}
	}
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	if c := h.objectStorage(); c.OK || c.Fatal || !strings.Contains(c.Detail, "HTTP 503") {
		t.Errorf("doctor, while it is away: %+v", c)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	h.Kill("node") // another agent has them, too
	if c := h.objectStorage(); !c.OK {
		t.Errorf("doctor, when it is back: %+v", c)
	}
}

func (h *host) objectStorage() (found runtime.Check) {
	h.t.Helper()
	eventually(h.t, "the agent answers", func() bool {
		reports, err := h.Doctor(h.t.Context(), "")
		if err != nil || len(reports) == 0 {
			return false
		}
		for _, c := range reports[0].Checks {
			if c.Name == "object storage" {
				found = c
			}
		}
		return true
	})
	return found
}

func environ(t *testing.T, pid int) string {
	t.Helper()
	text := read(t, fmt.Sprintf("/proc/%d/environ", pid))
	if !strings.Contains(text, "PATH=") {
		t.Errorf("the environment of %d is %q", pid, text)
	}
	return text
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(bytes.ToValidUTF8(text, nil))
}

// credentials are those of the server, for every dsec up that is started.
func credentials(t *testing.T, server *s3test.Server) {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", server.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", server.SecretKey)
}
