package snapshot

import (
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/opendsec/dsec/image"
)

// TestMemoryIsByNameAndNotByByte bounds what a name costs while a disk is packed.
func TestMemoryIsByNameAndNotByByte(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	const files, each = 30_000, 450 // bytes
	dir, err := os.MkdirTemp("/dev/shm", "dsec-pack-")
	must(t, err)
	defer os.RemoveAll(dir)
	content := make([]byte, 8<<10)
	for i := range content {
		content[i] = byte(i) | 1
	}
	for i := range files {
		must(t, os.WriteFile(fmt.Sprintf("%s/name-of-a-file-%d", dir, i), content, 0o644))
	}
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	_, err = written(t, func(f image.Files) (Result, error) {
		k := NewPacking(f, Options{})
		if err := k.Read(t.Context(), Source{Upper: up, IDs: 65536}); err != nil {
			return Result{}, err
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		return k.Write()
	})
	must(t, err)
	if used := int64(after.HeapAlloc) - int64(before.HeapAlloc); used > files*each {
		t.Errorf("%d bytes for each name", used/files)
	} else {
		t.Logf("%d bytes for each name", used/files)
	}
}
