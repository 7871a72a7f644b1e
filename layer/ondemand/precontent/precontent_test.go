package precontent

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

func TestSupportedSaysWhyNot(t *testing.T) {
	if err := Supported(t.TempDir()); err != nil {
		if linux.Kernel().AtLeast(6, 14) && os.Geteuid() == 0 && !errors.Is(err, dsec.Unsupported.Err()) {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	shm, err := os.MkdirTemp("/dev/shm", "precontent-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(shm)
	if err := Supported(shm); !errors.Is(err, dsec.Unsupported.Err()) || !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("on a tmpfs: %v", err)
	}
	if err := Supported(t.TempDir() + "/none"); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("in no directory: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	b := make([]byte, shape.Size)
	le.PutUint32(b, 48)
	b[4], b[6] = unix.FANOTIFY_METADATA_VERSION, headerSize
	le.PutUint32(b[16:], 9)
	b[24], b[26] = unix.FAN_EVENT_INFO_TYPE_RANGE, rangeSize
	le.PutUint64(b[32:], 4096)
	le.PutUint64(b[40:], 8192)
	note(b, 7, 8)
	if e, err := parse(b); err != nil || e != (event{fd: 9, off: 4096, n: 8192, dev: 7, ino: 8}) {
		f.Fatalf("%+v, %v", e, err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		slot := make([]byte, shape.Size)
		copy(slot, b)
		e, err := parse(slot)
		if err == nil && (e.off < 0 || e.n < 0 || e.off+e.n < 0) {
			t.Errorf("%+v", e)
		}
	})
}
