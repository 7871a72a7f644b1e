package microvm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// elsewhere gives the data of layers as files that somebody else brings.
type elsewhere struct{ path string }

func (e elsewhere) Device(context.Context, layer.Local) (rootfs.Device, error) {
	return rootfs.Device{Path: e.path, Kind: "test"}, nil
}

// bigFile fills a layer with files that a guest cannot have read by chance.
func bigFile(dir string) error {
	for i := range 24 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("part%02d", i)), bytes.Repeat([]byte{'a' + byte(i)}, 1<<20), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// A layer that is whole is mapped: what is read of it is in no memory of the guest. One that is
// not is a disk whose reads somebody answers, or not, which is an error of that read; and it is mapped
// when it has become whole.
func TestLayersAreMappedWhenTheyAreWhole(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	l, err := layertest.Build(dir, bigFile)
	must(t, err)
	whole, err := os.ReadFile(l.Data)
	must(t, err)
	data := filepath.Join(dir, "elsewhere")
	must(t, os.WriteFile(data, whole[:len(whole)-(8<<20)], 0o600))
	w.devices = elsewhere{data}
	w.reopen(t)
	must(t, os.WriteFile(filepath.Join(dir, layer.PresentFile), nil, 0o600)) // it is not whole
	with := func(r *runtime.Request) { r.Layers.Layers = append(r.Layers.Layers, l) }
	id := w.create(t, with)
	const grown = `before=$(sed -n 's/^Cached: *//p' /proc/meminfo | sed 's/ .*//'); for i in 0 1 2 3 4 5 6 7; do cat /part0$i; done | wc -c; after=$(sed -n 's/^Cached: *//p' /proc/meminfo | sed 's/ .*//'); echo $((after-before))`
	o := w.run(t, id, "mount | grep -c dax; "+grown+"; cat /part23 >/dev/null; echo $?; head -c 3 /part00")
	lines := strings.Fields(o.Stdout)
	if len(lines) != 5 || lines[1] != fmt.Sprint(8<<20) || lines[3] == "0" || lines[4] != "aaa" {
		t.Errorf("as a disk: %+v", o)
	}
	if kib := number(t, lines[2]); kib < 7<<10 {
		t.Errorf("as a disk the page cache of the guest grew by %d KiB", kib)
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	must(t, os.Remove(filepath.Join(dir, layer.PresentFile)))
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	o = w.run(t, id, grown+"; tail -c 3 /part23")
	lines = strings.Fields(o.Stdout)
	if len(lines) != 3 || lines[0] != fmt.Sprint(8<<20) || lines[2] != "xxx" {
		t.Errorf("mapped: %+v", o)
	}
	if kib := number(t, lines[1]); kib > 2<<10 {
		t.Errorf("mapped, and the page cache of the guest grew by %d KiB", kib)
	}
}

func number(t *testing.T, text string) (n int) {
	t.Helper()
	if _, err := fmt.Sscan(text, &n); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return n
}

// A guest that writes to what is mapped changes nothing: the host has it read-only. What of a layer
// is gone from under a machine ends the sandbox, and it is the image's fault.
func TestLayerGoneFromUnderAMachine(t *testing.T) {
	w := newWorld(t)
	l, err := layertest.Build(t.TempDir(), bigFile)
	must(t, err)
	id := w.create(t, func(r *runtime.Request) { r.Layers.Layers = append(r.Layers.Layers, l) })
	before := sum(t, l.Data)
	if o := w.run(t, id, "cat /part03 >/dev/null && echo x > /part03 && head -c 1 /part03"); o.Stdout != "x" {
		t.Errorf("%+v", o)
	}
	if sum(t, l.Data) != before {
		t.Error("the layer changed")
	}
	must(t, os.Truncate(l.Data, 0))
	_, err = w.r.Exec(t.Context(), id, runtimetest.Shell("for i in 00 01 02 04 05 06 07 08 09 10 11; do cat /part$i; done >/dev/null"))
	must(t, err)
	if x := w.exitOf(t, id); x.Cause != dsec.CauseInfraImage || x.By != dsec.InducedByPlatform {
		t.Errorf("%+v", x)
	}
}

func sum(t *testing.T, path string) [32]byte {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return sha256.Sum256(b)
}
