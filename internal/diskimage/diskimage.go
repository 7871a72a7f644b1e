// Package diskimage is disk images as layers: the two files that such a layer has, and what of a file of
// somebody's makes one (docs/formats/diskimage.md).
package diskimage

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/qcow2"
)

// The files of a layer that is a disk image.
const (
	DiskFile     = "disk"
	ManifestFile = "disk.json"
	MaxManifest  = 4 << 10
	format       = 1
	kind         = "disk"
)

// Words of a Manifest.
const (
	BIOS   = "bios"
	UEFI   = "uefi"
	Virtio = "virtio"
	SATA   = "sata"
	Std    = "std"
	None   = "none"
)

// Manifest says what machine a disk is for.
type Manifest struct {
	Format   int    `json:"format"`
	Kind     string `json:"kind"`
	Size     int64  `json:"size"`     // of the disk in bytes
	Firmware string `json:"firmware"` // bios, uefi
	Bus      string `json:"bus"`      // of the disk: virtio, sata
	Video    string `json:"video"`    // std, virtio, none
	Agent    bool   `json:"agent"`    // the guest agent is a service in it
}

// New is a manifest with its defaults: BIOS, virtio, VGA.
func New(size int64) Manifest {
	return Manifest{Format: format, Kind: kind, Size: size, Firmware: BIOS, Bus: Virtio, Video: Std}
}

// Parse reads one that nobody vouches for.
func Parse(text []byte) (Manifest, error) {
	const op, object = "parse", "manifest of a disk image"
	var head struct {
		Format int    `json:"format"`
		Kind   string `json:"kind"`
	}
	if len(text) > MaxManifest {
		return Manifest{}, dsec.Errorf(dsec.Invalid, op, object, "more than %d bytes", MaxManifest)
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return Manifest{}, dsec.E(dsec.Invalid, op, object, err)
	}
	if head.Kind == kind && head.Format != format {
		return Manifest{}, dsec.Errorf(dsec.Unsupported, op, object, "format %d, this version of dsec knows %d", head.Format, format)
	}
	var m Manifest
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return Manifest{}, dsec.E(dsec.Invalid, op, object, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return Manifest{}, dsec.Errorf(dsec.Invalid, op, object, "something follows it")
	}
	return m, m.Check()
}

// Check says what is wrong with it, as Invalid.
func (m Manifest) Check() error {
	bad := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, "check", "manifest of a disk image", format, args...)
	}
	switch {
	case m.Kind != kind || m.Format != format:
		return bad("the kind %s", dsec.Quote(m.Kind))
	case m.Size <= 0 || m.Size > qcow2.MaxSize || m.Size%512 != 0:
		return bad("a disk of %d bytes: whole sectors of 512, up to %d", m.Size, int64(qcow2.MaxSize))
	case m.Firmware != BIOS && m.Firmware != UEFI:
		return bad("the firmware %s: bios or uefi", dsec.Quote(m.Firmware))
	case m.Bus != Virtio && m.Bus != SATA:
		return bad("the bus %s: virtio or sata", dsec.Quote(m.Bus))
	case m.Video != Std && m.Video != Virtio && m.Video != None:
		return bad("the screen %s: std, virtio or none", dsec.Quote(m.Video))
	}
	return nil
}

// Source is a disk to be read once, from its beginning to its end.
type Source struct {
	Size int64
	io.Reader
}

// Read looks at a file: a qcow2 image that stands for itself, or a raw disk that a firmware would boot.
func Read(f *os.File) (Source, error) {
	const op = "read disk image"
	st, err := f.Stat()
	if err != nil {
		return Source{}, dsec.E(dsec.Internal, op, f.Name(), err)
	}
	if !st.Mode().IsRegular() {
		return Source{}, dsec.Errorf(dsec.Invalid, op, f.Name(), "it is no regular file")
	}
	head := make([]byte, 520)
	if n, err := f.ReadAt(head, 0); n < len(head) {
		return Source{}, dsec.Errorf(dsec.Invalid, op, f.Name(), "%d bytes are no disk: %w", n, err)
	}
	if qcow2.Is(head) {
		i, err := qcow2.Open(f, st.Size())
		if err != nil {
			return Source{}, dsec.E(dsec.ClassOf(err), op, f.Name(), err)
		}
		return Source{i.Size(), i.Reader()}, nil
	}
	for magic, name := range map[string]string{"KDMV": "VMDK", "vhdxfile": "VHDX", "conectix": "VHD", "<<< ": "VDI", "QED\x00": "QED"} {
		if bytes.HasPrefix(head, []byte(magic)) {
			return Source{}, dsec.Errorf(dsec.Unsupported, op, f.Name(), "it is %s; make it qcow2 with qemu-img convert", name)
		}
	}
	if st.Size()%512 != 0 || !(head[510] == 0x55 && head[511] == 0xaa || bytes.HasPrefix(head[512:], []byte("EFI PART"))) {
		return Source{}, dsec.Errorf(dsec.Invalid, op, f.Name(), "it is neither qcow2 nor a disk with a table of partitions in whole sectors of 512 bytes")
	}
	return Source{st.Size(), io.NewSectionReader(f, 0, st.Size())}, nil
}

// WriteTar writes the tree of such a layer.
func WriteTar(w io.Writer, m Manifest, disk io.Reader) error {
	if err := m.Check(); err != nil {
		return err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return dsec.E(dsec.Internal, "write", ManifestFile, err)
	}
	t := tar.NewWriter(w)
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: ManifestFile, Mode: 0o444, Size: int64(len(text))}); err != nil {
		return err
	}
	if _, err := t.Write(text); err != nil {
		return err
	}
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: DiskFile, Mode: 0o444, Size: m.Size, Format: tar.FormatPAX}); err != nil {
		return err
	}
	if n, err := io.CopyBuffer(struct{ io.Writer }{t}, disk, make([]byte, 1<<20)); err != nil || n != m.Size {
		if err == nil {
			err = dsec.Errorf(dsec.Corrupt, "write", DiskFile, "%d bytes came, of %d", n, m.Size)
		}
		return err
	}
	return t.Close()
}
