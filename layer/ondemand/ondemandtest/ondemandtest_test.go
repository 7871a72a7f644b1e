package ondemandtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec/blob/s3test"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

func TestConformance(t *testing.T) {
	server := s3test.Start(t)
	for _, m := range []Mechanism{overFUSE, byEvents} {
		dir := t.TempDir()
		for _, b := range []Backend{
			{Name: "files", URL: "file://" + dir, Dir: dir},
			{Name: "s3", URL: server.URL(m.Name), Dir: filepath.Join(server.Data(), s3test.BucketName, m.Name), Break: server.Proxy.Set},
		} {
			t.Run(m.Name+" and "+b.Name, func(t *testing.T) { Run(t, m, b) })
		}
	}
}

// TestE26_LoopDevicesOverFUSE: kernels before 6.12 mount devices only, and so
// what is not here is read through a loop device over the file that waits for it.
func TestE26_LoopDevicesOverFUSE(t *testing.T) {
	dir := t.TempDir()
	// What the store does wrong is the same whoever reads.
	Run(t, throughLoops, Backend{Name: "files", URL: "file://" + dir, Dir: dir}, "every byte is right", "programs run", "a chunk is fetched once",
		"the disk is full", "killed readers", "killed servers", "whole")
}
