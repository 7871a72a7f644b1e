package qemu

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// carried is a snapshot of a machine of a driver, as another one is told of it.
func carriedFrom(t testing.TB, d *Driver, s vmm.Shape) []byte {
	t.Helper()
	man := manifest{Format: format, Kind: kindSnapshot, Identity: d.identity(line{accel: d.accelOf(s.Kernel.SHA256), shape: s}), State: content{6, strings.Repeat("5", 64)}}
	cpu, err := cpuOf(man.Identity.Accel)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(about{man.encode(), cpu})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func carryingDriver(accel string) (*Driver, vmm.Shape) {
	s := vmm.Shape{Kernel: vmm.File{Path: "k", SHA256: strings.Repeat("a", 64)}, Initramfs: vmm.File{Path: "i", SHA256: strings.Repeat("b", 64)},
		CPUs: 1, Memory: 256 << 20, Pmem: []int64{2 << 20}, Disk: 64 << 30, NIC: true}
	return &Driver{version: "QEMU 7", cfg: Config{Firmware: "/qboot"}, accel: map[string]vmm.Caps{s.Kernel.SHA256: {Accel: accel}}}, s
}

// What a driver would make another machine of is refused before a byte is asked for, and says what differs.
func TestSnapshotsOfOtherMachinesAreRefused(t *testing.T) {
	for _, accel := range []string{tcg, kvm} {
		d, s := carryingDriver(accel)
		text := carriedFrom(t, d, s)
		dir := t.TempDir()
		place := func(name string, to *Driver, shape vmm.Shape, text []byte) error {
			return to.PlaceSnapshot(t.Context(), filepath.Join(dir, name), text, shape, func(f *os.File) error {
				_, err := f.WriteString("memory"[:6])
				return err
			})
		}
		if err := place("same", d, s, text); err != nil {
			t.Fatal(err)
		}
		if man, err := readManifest(filepath.Join(dir, "same"), kindSnapshot); err != nil || man.State.Size != 6 {
			t.Errorf("%+v %v", man, err)
		}
		if err := place("same", d, s, text); dsec.ClassOf(err) != dsec.AlreadyExists {
			t.Errorf("over another: %v", err)
		}
		for what, change := range map[string]func(d *Driver, s *vmm.Shape, text *string){
			"QEMU": func(d *Driver, _ *vmm.Shape, _ *string) { d.version = "QEMU 10" },
			"accelerator": func(d *Driver, s *vmm.Shape, _ *string) {
				d.accel[s.Kernel.SHA256] = vmm.Caps{Accel: map[string]string{tcg: kvm, kvm: tcg}[accel]}
			},
			"kernel": func(d *Driver, s *vmm.Shape, _ *string) {
				s.Kernel.SHA256 = strings.Repeat("c", 64)
				d.accel[s.Kernel.SHA256] = vmm.Caps{Accel: accel}
			},
			"initramfs":    func(_ *Driver, s *vmm.Shape, _ *string) { s.Initramfs.SHA256 = strings.Repeat("c", 64) },
			"shape":        func(_ *Driver, s *vmm.Shape, _ *string) { s.Memory *= 2 },
			"command line": func(d *Driver, _ *vmm.Shape, _ *string) { d.cfg.Firmware = "/seabios" },
			"processor": func(_ *Driver, _ *vmm.Shape, text *string) {
				*text = (*text)[:strings.LastIndex(*text, `"cpu":`)] + `"cpu":"` + strings.Repeat("d", 64) + `"}`
			},
		} {
			other, shape := carryingDriver(accel)
			said := string(text)
			change(other, &shape, &said)
			asked := false
			err := other.PlaceSnapshot(t.Context(), filepath.Join(dir, "other"), []byte(said), shape, func(*os.File) error { asked = true; return nil })
			if dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), what) || asked {
				t.Errorf("%s, another %s: %v, asked %v", accel, what, err, asked)
			}
		}
		short := d.PlaceSnapshot(t.Context(), filepath.Join(dir, "short"), text, s, func(*os.File) error { return nil })
		if dsec.ClassOf(short) != dsec.Corrupt {
			t.Errorf("less than was said: %v", short)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
			t.Errorf("left: %v %v", left, err)
		}
	}
}

func TestProcessorsAreToldByTheirModel(t *testing.T) {
	const one = "processor\t: 0\nvendor_id\t: A\ncpu family\t: 6\nmodel\t\t: 1\nmodel name\t: x\nstepping\t: 2\ncpu MHz\t\t: 1\nflags\t\t: fpu vme\n\nprocessor\t: 1\nmodel\t\t: 9\n"
	was, err := cpuDigest([]byte(one))
	if err != nil {
		t.Fatal(err)
	}
	for text, same := range map[string]bool{
		strings.Replace(one, "MHz\t\t: 1", "MHz\t\t: 7", 1): true, strings.Replace(one, "fpu vme", "vme fpu", 1): true,
		strings.Replace(one, "fpu vme", "fpu", 1): false, strings.Replace(one, "stepping\t: 2", "stepping\t: 3", 1): false,
		strings.Replace(one, "vendor_id\t: A", "vendor_id\t: B", 1): false, strings.Replace(one, "model\t\t: 1", "model\t\t: 2", 1): false,
	} {
		if now, err := cpuDigest([]byte(text)); err != nil || (now == was) != same {
			t.Errorf("%q: %v %v", text, now == was, err)
		}
	}
	if _, err := cpuDigest([]byte("processor: 0\n")); err == nil {
		t.Error("one that does not say what it is")
	}
}

// Whatever comes from elsewhere is refused with a class, or read as a whole snapshot.
func FuzzParseAbout(f *testing.F) {
	d, s := carryingDriver(tcg)
	good := carriedFrom(f, d, s)
	f.Add(good)
	f.Add(good[:len(good)/2])
	f.Add([]byte(`{"snapshot":null,"cpu":""}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		man, _, err := parseAbout(b)
		class := dsec.ClassOf(err)
		if err != nil && class != dsec.Corrupt && class != dsec.Unsupported || err == nil && man.Kind != kindSnapshot {
			t.Fatalf("%q: %+v %v", b, man, err)
		}
	})
}
