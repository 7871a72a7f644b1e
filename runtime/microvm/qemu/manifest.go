package qemu

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// format is the version of docs/formats/vmtemplate.md.
const format = 1

// Kinds of states.
const (
	kindTemplate = "template"
	kindSnapshot = "snapshot"
)

// identity is what must be the same for a state to be loaded. Its fields, in this
// order, are in the key of a template.
type identity struct {
	QEMU      string  `json:"qemu"`  // what it says as its version
	Accel     string  `json:"accel"` // a state of one is not for another
	Line      string  `json:"line"`  // digest of the command line
	Kernel    string  `json:"kernel"`
	Initramfs string  `json:"initramfs"`
	Append    string  `json:"append"`
	CPUs      int     `json:"cpus"`
	Memory    int64   `json:"memory"`
	Pmem      []int64 `json:"pmem"`
	Disk      int64   `json:"disk"`
	NIC       bool    `json:"nic"`
	Blocks    []int64 `json:"blocks,omitempty"`
	Firmware  bool    `json:"firmware,omitempty"` // and the kernel is it
	Video     string  `json:"video,omitempty"`
	Bus       string  `json:"bus,omitempty"`
	Balloon   bool    `json:"balloon,omitempty"`
}

// noFile is the digest of an initramfs where there is none.
var noFile = strings.Repeat("0", 64)

// identity of the machine that a line starts, whatever its descriptors.
func (d *Driver) identity(l line) identity {
	s := l.shape
	plain := line{accel: l.accel, shape: s, firmware: d.cfg.Firmware, slots: make([]int, len(s.Pmem)), blocks: make([]int, len(s.Blocks)), initramfs: 1}
	sum := sha256.Sum256([]byte(strings.Join(plain.args(), "\x00")))
	initramfs := s.Initramfs.SHA256
	if s.Firmware {
		initramfs = noFile
	}
	return identity{QEMU: d.version, Accel: l.accel, Line: hex.EncodeToString(sum[:]), Kernel: s.Kernel.SHA256, Initramfs: initramfs,
		Append: s.Append, CPUs: s.CPUs, Memory: s.Memory, Pmem: append([]int64{}, s.Pmem...), Disk: s.Disk, NIC: s.NIC, Blocks: slices.Clone(s.Blocks),
		Firmware: s.Firmware, Video: s.Video, Bus: s.Bus, Balloon: s.Balloon}
}

func (i identity) equal(j identity) bool {
	a, b := i, j
	a.Pmem, b.Pmem = nil, nil
	return slices.Equal(i.Pmem, j.Pmem) && slices.Equal(i.Blocks, j.Blocks) && a.QEMU == b.QEMU && a.Accel == b.Accel && a.Line == b.Line && a.Kernel == b.Kernel &&
		a.Initramfs == b.Initramfs && a.Append == b.Append && a.CPUs == b.CPUs && a.Memory == b.Memory && a.Disk == b.Disk && a.NIC == b.NIC &&
		a.Firmware == b.Firmware && a.Video == b.Video && a.Bus == b.Bus && a.Balloon == b.Balloon
}

// shape has the digests of the kernel and the initramfs, and not the files.
func (i identity) shape() vmm.Shape {
	return vmm.Shape{Kernel: vmm.File{SHA256: i.Kernel}, Initramfs: vmm.File{SHA256: i.Initramfs}, Append: i.Append,
		CPUs: i.CPUs, Memory: i.Memory, Pmem: i.Pmem, Disk: i.Disk, NIC: i.NIC, Blocks: i.Blocks,
		Firmware: i.Firmware, Video: i.Video, Bus: i.Bus, Balloon: i.Balloon}
}

// key names a template.
func (i identity) key() string {
	text, err := json.Marshal(i)
	if err != nil {
		panic(err) // strings and numbers
	}
	sum := sha256.Sum256(append([]byte("dsec vm template 1\n"), text...))
	return hex.EncodeToString(sum[:])
}

var keyForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// manifest says what a directory with a state has.
type manifest struct {
	Format   int      `json:"format"`
	Kind     string   `json:"kind"`
	Identity identity `json:"identity"`
	RAM      *content `json:"ram,omitempty"` // of a template
	State    content  `json:"state"`
}

type content struct {
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"` // of memory: see hashBlocks
}

func (m manifest) encode() []byte {
	text, err := json.MarshalIndent(m, "", " ")
	if err != nil {
		panic(err) // strings and numbers
	}
	return append(text, '\n')
}

// maxManifest is the longest manifest that is read.
const maxManifest = 64 << 10

// readManifest reads and checks one of this kind.
func readManifest(dir, kind string) (manifest, error) {
	const op = "read manifest"
	name := filepath.Join(dir, "manifest.json")
	f, err := os.Open(name)
	if err != nil {
		return manifest{}, dsec.E(fault.Class(err, dsec.Internal), op, name, cause(err))
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return manifest{}, dsec.E(dsec.Internal, op, name, cause(err))
	}
	m, err := parseManifest(text)
	if err != nil {
		return manifest{}, dsec.E(dsec.ClassOf(err), op, name, err)
	}
	if m.Kind != kind {
		return manifest{}, dsec.Errorf(dsec.Invalid, op, name, "it is a %s, not a %s", m.Kind, kind)
	}
	return m, nil
}

func parseManifest(text []byte) (manifest, error) {
	const op, object = "parse", "manifest"
	bad := func(format string, args ...any) (manifest, error) {
		return manifest{}, dsec.Errorf(dsec.Corrupt, op, object, format, args...)
	}
	var m manifest
	if len(text) > maxManifest {
		return bad("more than %d bytes", maxManifest)
	}
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(text, &version); err != nil {
		return bad("%w", err)
	}
	if version.Format != format {
		return manifest{}, dsec.Errorf(dsec.Unsupported, op, object, "format %d, this version of dsec knows %d", version.Format, format)
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return bad("%w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return bad("something follows it")
	}
	i := m.Identity
	digests := []string{i.Line, i.Kernel, i.Initramfs, m.State.SHA256}
	if m.RAM != nil {
		digests = append(digests, m.RAM.SHA256)
	}
	for _, s := range digests {
		if !keyForm.MatchString(s) {
			return bad("%s is no SHA-256", dsec.Quote(s))
		}
	}
	s := i.shape()
	s.Kernel.Path, s.Initramfs.Path = "-", "-"
	if err := s.Check(); err != nil {
		return bad("%w", err)
	}
	switch {
	case m.Kind != kindTemplate && m.Kind != kindSnapshot:
		return bad("the kind %s", dsec.Quote(m.Kind))
	case (m.Kind == kindTemplate) != (m.RAM != nil):
		return bad("a template has memory beside its state, a snapshot has not")
	case m.Kind == kindTemplate && i.Balloon:
		return bad("a template with a balloon")
	case m.RAM != nil && m.RAM.Size != i.Memory:
		return bad("%d bytes of memory are %d", i.Memory, m.RAM.Size)
	case m.State.Size <= 0 || m.State.Size > maxState(m.Kind, i.Memory):
		return bad("a state of %d bytes", m.State.Size)
	}
	return m, nil
}

// maxState bounds a state: that of devices, and for a snapshot the memory too.
func maxState(kind string, memory int64) int64 {
	if kind == kindTemplate {
		return 64 << 20
	}
	return memory + memory>>6 + 64<<20
}
