package qemu

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

var _ vmm.Carrier = (*Driver)(nil)

// about is what a snapshot that is elsewhere is told by, docs/formats/checkpoint.md.
type about struct {
	Snapshot json.RawMessage `json:"snapshot"`
	CPU      string          `json:"cpu"` // the machine's own, where the guest sees it
}

// maxAbout is the longest that is read.
const maxAbout = 2 * maxManifest

// OpenSnapshot implements vmm.Carrier.
func (d *Driver) OpenSnapshot(dir string) ([]byte, *os.File, error) {
	const op = "open snapshot"
	man, err := readManifest(dir, kindSnapshot)
	if err != nil {
		return nil, nil, err
	}
	cpu, err := cpuOf(man.Identity.Accel)
	if err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(about{man.encode(), cpu})
	if err != nil {
		return nil, nil, dsec.E(dsec.Internal, op, dir, err)
	}
	state, err := openState(dir, man.State)
	return text, state, err
}

// PlaceSnapshot implements vmm.Carrier.
func (d *Driver) PlaceSnapshot(ctx context.Context, dir string, text []byte, s vmm.Shape, fill func(*os.File) error) error {
	const op = "place snapshot"
	man, cpu, err := parseAbout(text)
	if err != nil {
		return dsec.E(dsec.ClassOf(err), op, dir, err)
	}
	if err := d.takes(man.Identity, cpu, s); err != nil {
		return dsec.E(dsec.ClassOf(err), op, dir, err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return dsec.E(dsec.AlreadyExists, op, dir, err)
	}
	work, err := os.MkdirTemp(filepath.Dir(dir), ".tmp-snapshot-")
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), op, dir, cause(err))
	}
	defer func() { _ = os.RemoveAll(work) }()
	var unfilled error // whose own words say more
	_, err = writeTo(work, "state", func(f *os.File) (content, error) {
		if unfilled = fill(f); unfilled != nil {
			return content{}, unfilled
		}
		st, err := f.Stat()
		if err == nil && st.Size() != man.State.Size {
			err = dsec.Errorf(dsec.Corrupt, op, dir, "a state of %d bytes, its manifest says %d", st.Size(), man.State.Size)
		}
		return content{}, err
	})
	if unfilled != nil {
		err = unfilled
	}
	if err != nil {
		return dsec.E(dsec.ClassOf(err), op, dir, err)
	}
	return publish(ctx, work, dir, man)
}

func parseAbout(text []byte) (man manifest, cpu string, err error) {
	const op, object = "parse", "snapshot"
	if len(text) > maxAbout {
		return man, "", dsec.Errorf(dsec.Corrupt, op, object, "more than %d bytes", maxAbout)
	}
	var a about
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&a); err != nil {
		return man, "", dsec.E(dsec.Corrupt, op, object, err)
	}
	if man, err = parseManifest(a.Snapshot); err != nil {
		return man, "", err
	}
	if man.Kind != kindSnapshot {
		return man, "", dsec.Errorf(dsec.Corrupt, op, object, "it is a %s", man.Kind)
	}
	return man, a.CPU, nil
}

// takes says why this driver would not go on with a machine as one of a shape.
func (d *Driver) takes(is identity, cpu string, s vmm.Shape) error {
	const op, object = "compare", "virtual machine"
	no := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Unsupported, op, object, format, args...)
	}
	want := d.identity(line{accel: d.accelOf(s.Kernel.SHA256), shape: s})
	switch {
	case is.QEMU != want.QEMU:
		return no("it is of %s, and this is %s", dsec.Quote(is.QEMU), dsec.Quote(want.QEMU))
	case is.Accel != want.Accel:
		return no("it is of accelerator %s, and %s is used here", dsec.Quote(is.Accel), want.Accel)
	case is.Kernel != want.Kernel:
		return no("its kernel is %s, and the one here %s", is.Kernel, want.Kernel)
	case is.Initramfs != want.Initramfs:
		return no("its initramfs, which has the agent of guests, is %s, and the one here %s: it was made by another release", is.Initramfs, want.Initramfs)
	case !is.equal(want):
		return no("it has another command line or shape than one that is made here: %d processors, %d MiB, slots of %v and disks of %v bytes; here %d, %d, %v and %v",
			is.CPUs, is.Memory>>20, is.Pmem, is.Blocks, want.CPUs, want.Memory>>20, want.Pmem, want.Blocks)
	}
	own, err := cpuOf(is.Accel)
	if err == nil && own != cpu {
		err = no("it saw the processor %s, and the one here is %s", dsec.Quote(cpu), own)
	}
	return err
}

// cpuOf is what a guest sees of this machine's processor: with emulation nothing.
func cpuOf(accel string) (string, error) {
	if accel != kvm {
		return "", nil
	}
	const name = "/proc/cpuinfo"
	b, err := os.ReadFile(name)
	if err != nil {
		return "", dsec.E(dsec.Internal, "read", name, cause(err))
	}
	return cpuDigest(b)
}

// cpuFields of the first processor are what a model is told by.
var cpuFields = []string{"vendor_id", "cpu family", "model", "stepping", "flags"}

func cpuDigest(cpuinfo []byte) (string, error) {
	found := map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(cpuinfo))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() && lines.Text() != "" {
		key, value, _ := strings.Cut(lines.Text(), ":")
		found[strings.TrimSpace(key)] = strings.TrimSpace(value)
	}
	h := sha256.New()
	for _, f := range cpuFields {
		value, ok := found[f]
		if !ok {
			return "", dsec.Errorf(dsec.Internal, "read", "/proc/cpuinfo", "it does not say its %s", f)
		}
		if f == "flags" { // in which order is the kernel's business
			words := strings.Fields(value)
			slices.Sort(words)
			value = strings.Join(words, " ")
		}
		_, _ = h.Write([]byte(value + "\n"))
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
