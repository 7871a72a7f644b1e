package qemu

import (
	"bytes"
	"debug/elf"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	name = filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != got {
		t.Errorf("%s:\n%s\nwant:\n%s", name, got, text)
	}
}

func fullShape() vmm.Shape {
	return vmm.Shape{Kernel: vmm.File{Path: "/k", SHA256: strings.Repeat("a", 64)}, Initramfs: vmm.File{Path: "/i", SHA256: strings.Repeat("b", 64)},
		Append: "more,of=it", CPUs: 2, Memory: 256 << 20, Pmem: []int64{2 << 20, 3 << 30}, Disk: 1 << 30, NIC: true}
}

func TestCommandLines(t *testing.T) {
	small := fullShape()
	small.Pmem, small.Disk, small.NIC, small.Append = nil, 0, false, ""
	reporting := small
	reporting.Balloon = true
	var out strings.Builder
	for _, c := range []struct {
		name string
		line line
	}{
		{"cold, all devices", line{accel: tcg, shape: fullShape(), qmp: 3, agent: 4, kernel: 5, initramfs: 6, slots: []int{7, 8}, disk: 9, tap: 10}},
		{"cold, no devices, KVM", line{accel: kvm, shape: small, qmp: 3, agent: 4, kernel: 5, initramfs: 6}},
		{"template", line{accel: tcg, shape: fullShape(), qmp: 3, agent: 4, kernel: 5, initramfs: 6, slots: []int{7, 8}, disk: 9, cable: 11, ram: 12, shared: true}},
		{"clone", line{accel: tcg, shape: fullShape(), qmp: 3, agent: 4, kernel: 5, slots: []int{7, 8}, disk: 9, tap: 10, ram: 12}},
		{"restored", line{accel: tcg, shape: small, qmp: 3, agent: 4, kernel: 5}},
		{"cold, with a balloon", line{accel: tcg, shape: reporting, qmp: 3, agent: 4, kernel: 5, initramfs: 6}},
	} {
		c.line.firmware = "/qboot.rom"
		out.WriteString("# " + c.name + "\n" + strings.Join(c.line.args(), "\n") + "\n")
		for _, a := range c.line.args() {
			if strings.Contains(a, "balloon") != (c.line.shape.Balloon && strings.HasPrefix(a, "virtio-balloon")) || strings.Contains(a, "fd=0") || strings.Contains(a, "/fd/0") {
				t.Errorf("%s: %s", c.name, a)
			}
		}
	}
	golden(t, "lines.txt", out.String())
}

// What a clone reports as free is a part of its template.
func TestNoTemplateHasABalloon(t *testing.T) {
	s := fullShape()
	s.Balloon = true
	_, err := (&Driver{}).BuildTemplate(t.Context(), s, ready)
	wantClass(t, err, dsec.Unsupported, "balloon")
}

func TestManifestAndKeyOfVersion1(t *testing.T) {
	d := &Driver{version: "QEMU emulator version 7.2.22", cfg: Config{Firmware: "/qboot.rom"}}
	ident := d.identity(line{accel: tcg, shape: fullShape(), kernel: 9, ram: 8})
	if again := d.identity(line{accel: tcg, shape: fullShape(), initramfs: 3, tap: 4, qmp: 5, slots: []int{1, 2}}); !again.equal(ident) {
		t.Error("the identity depends on descriptors")
	}
	// The line is a digest of lines.txt's kind, and may change without the format.
	ident.Line = strings.Repeat("c", 64)
	man := manifest{Format: format, Kind: kindTemplate, Identity: ident, RAM: &content{256 << 20, strings.Repeat("d", 64)},
		State: content{1000, strings.Repeat("e", 64)}}
	golden(t, "vmtemplate-v1.json", string(man.encode()))
	golden(t, "vmtemplate-v1.key", ident.key()+"\n")
	got, err := parseManifest(man.encode())
	if err != nil || !got.Identity.equal(ident) || *got.RAM != *man.RAM || got.State != man.State {
		t.Errorf("%+v, %v", got, err)
	}
	for name, c := range map[string]struct {
		from, to string
		class    dsec.Class
	}{
		"newer":       {`"format": 1`, `"format": 2`, dsec.Unsupported},
		"other field": {`"kind"`, `"x": 1, "kind"`, dsec.Corrupt},
		"digest":      {strings.Repeat("e", 64), strings.Repeat("E", 64), dsec.Corrupt},
		"no state":    {`"size": 1000`, `"size": 0`, dsec.Corrupt},
		"huge state":  {`"size": 1000`, `"size": 100000000000`, dsec.Corrupt},
		"slots":       {"2097152", "2097153", dsec.Corrupt},
		"kind":        {"template", "snapshot", dsec.Corrupt},
		"memory":      {`"memory": 268435456`, `"memory": 134217728`, dsec.Corrupt},
		"balloon":     {`"nic": true`, `"nic": true, "balloon": true`, dsec.Corrupt},
		"cut":         {"}\n", "", dsec.Corrupt},
	} {
		text := strings.Replace(string(man.encode()), c.from, c.to, 1)
		if name == "cut" {
			text = text[:len(text)/2]
		}
		if _, err := parseManifest([]byte(text)); dsec.ClassOf(err) != c.class {
			t.Errorf("%s: %v, want %s", name, err, c.class)
		}
	}
	// Whatever the guest can see differ by, templates differ by.
	keys := map[string]string{}
	for name, change := range map[string]func(*line){
		"":        func(*line) {},
		"accel":   func(l *line) { l.accel = kvm },
		"kernel":  func(l *line) { l.shape.Kernel.SHA256 = strings.Repeat("f", 64) },
		"init":    func(l *line) { l.shape.Initramfs.SHA256 = strings.Repeat("f", 64) },
		"append":  func(l *line) { l.shape.Append += " x" },
		"cpus":    func(l *line) { l.shape.CPUs++ },
		"memory":  func(l *line) { l.shape.Memory += 1 << 20 },
		"slots":   func(l *line) { l.shape.Pmem[1] += 2 << 20 },
		"disk":    func(l *line) { l.shape.Disk += 512 },
		"no nic":  func(l *line) { l.shape.NIC = false },
		"no disk": func(l *line) { l.shape.Disk = 0 },
		"balloon": func(l *line) { l.shape.Balloon = true },
	} {
		l := line{accel: tcg, shape: fullShape()}
		change(&l)
		key := d.identity(l).key()
		if other, ok := keys[key]; ok {
			t.Errorf("%q and %q have one key", name, other)
		}
		keys[key] = name
	}
}

func FuzzManifest(f *testing.F) {
	text, err := os.ReadFile("testdata/vmtemplate-v1.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := parseManifest(text)
		if err != nil {
			return
		}
		if again, err := parseManifest(m.encode()); err != nil || !again.Identity.equal(m.Identity) {
			t.Errorf("%v: %s", err, text)
		}
	})
}

func TestStubIsAKernelForPVH(t *testing.T) {
	f, err := elf.NewFile(bytes.NewReader(stub()))
	if err != nil {
		t.Fatal(err)
	}
	if f.Type != elf.ET_EXEC || f.Machine != elf.EM_X86_64 || len(f.Progs) != 2 || f.Progs[1].Type != elf.PT_NOTE || f.Progs[1].Filesz != 28 {
		t.Errorf("%+v", f.FileHeader)
	}
}
