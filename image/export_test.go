package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// TestExportImports: a layer that is exported and converted again is the same
// layer, byte for byte.
func TestExportImports(t *testing.T) {
	odd := file("etc/odd", "x")
	odd.ModTime, odd.Mode, odd.Uid, odd.Format = time.Unix(1700000000, 123456789), 0o4755, 70000, tar.FormatPAX
	upper := makeTar(t, dir("./"), dir("etc"), odd, hardLink("etc/odd2", "etc/odd"), symlink("link", "etc/odd"), node("dev", tar.TypeBlock, 259, 300),
		node("fifo", tar.TypeFifo, 0, 0), xattr(dir("d"), "user.x", "y"), file("d/.wh..wh..opq", ""), file(".wh.gone", ""), file("sparse", string(make([]byte, 200000))+"x"))
	loc := Location{Source: "upper", Kind: KindFile, Tar: true, Whiteouts: true, Path: writeFile(t, upper)}
	first := convertAt(t, loc, Options{KeepWhiteouts: true})
	for _, oci := range []bool{false, true} {
		var b bytes.Buffer
		if err := WriteTar(context.Background(), openConverted(t, first), &b, oci); err != nil {
			t.Fatal(err)
		}
		loc.Path, loc.Whiteouts = writeFile(t, b.Bytes()), oci
		again := convertAt(t, loc, Options{KeepWhiteouts: true})
		if !bytes.Equal(readFile(t, first.meta), readFile(t, again.meta)) || !bytes.Equal(readFile(t, first.data), readFile(t, again.data)) {
			t.Errorf("oci %v: another layer: %v", oci, describeTree(t, mount(t, again)))
		}
	}
}

func TestExportRefusesNamesItCannotSay(t *testing.T) {
	c := mustConvert(t, writeFile(t, makeTar(t, file("d/.wh.real", "x"))), Options{})
	var b bytes.Buffer
	if err := WriteTar(context.Background(), openConverted(t, c), &b, true); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("got %v", err)
	}
	if err := WriteTar(context.Background(), openConverted(t, c), &b, false); err != nil {
		t.Error(err)
	}
}
