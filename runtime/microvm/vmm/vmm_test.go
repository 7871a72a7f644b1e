package vmm

import (
	"os"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func good() Shape {
	return Shape{Kernel: File{Path: "k"}, Initramfs: File{Path: "i"}, CPUs: 1, Memory: 64 << 20, Pmem: []int64{PmemAlign}, Disk: 512, NIC: true}
}

func TestShapes(t *testing.T) {
	if err := good().Check(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Shape){
		"no kernel":    func(s *Shape) { s.Kernel.Path = "" },
		"no initramfs": func(s *Shape) { s.Initramfs.Path = "" },
		"no CPU":       func(s *Shape) { s.CPUs = 0 },
		"many CPUs":    func(s *Shape) { s.CPUs = 256 },
		"no memory":    func(s *Shape) { s.Memory = 0 },
		"odd memory":   func(s *Shape) { s.Memory++ },
		"much memory":  func(s *Shape) { s.Memory = 1<<40 + 1<<20 },
		"negative":     func(s *Shape) { s.Disk = -512 },
		"half sector":  func(s *Shape) { s.Disk = 513 },
		"huge disk":    func(s *Shape) { s.Disk = 1<<50 + 512 },
		"4 KiB slot":   func(s *Shape) { s.Pmem[0] = 4096 },
		"odd slot":     func(s *Shape) { s.Pmem[0] += 4096 },
		"no slot":      func(s *Shape) { s.Pmem[0] = 0 },
		"huge slot":    func(s *Shape) { s.Pmem[0] = 1<<42 + PmemAlign },
		"many slots":   func(s *Shape) { s.Pmem = make([]int64, 17) },
		"long line":    func(s *Shape) { s.Append = strings.Repeat("x", 1025) },
		"two lines":    func(s *Shape) { s.Append = "a\nb" },
		"no ASCII":     func(s *Shape) { s.Append = "ä" },
	} {
		s := good()
		change(&s)
		if err := s.Check(); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDevicesFitTheirShape(t *testing.T) {
	bare := good()
	bare.NIC, bare.Disk, bare.Pmem = false, 0, nil
	for name, c := range map[string]struct {
		d  Devices
		s  Shape
		ok bool
	}{
		"all":           {Devices{Pmem: []string{"p"}, Disk: "d", Tap: os.Stdin}, good(), true},
		"empty slots":   {Devices{Disk: "d"}, good(), true},
		"nothing":       {Devices{}, bare, true},
		"no disk":       {Devices{}, good(), false},
		"disk too many": {Devices{Disk: "d"}, bare, false},
		"slots":         {Devices{Pmem: []string{""}}, bare, false},
		"tap too many":  {Devices{Tap: os.Stdin}, bare, false},
	} {
		if err := c.d.Check(c.s); (err == nil) != c.ok || (err != nil && dsec.ClassOf(err) != dsec.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
