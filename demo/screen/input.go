package main

import (
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unsafe"
)

// event is struct input_event without its time; positions are thousandths of the
// device's range.
type event struct {
	kind, code uint16
	value      int32
	device     string // of which it is; with kind 0: it is there now
}

// Kinds and codes of linux/input.h.
const (
	evKey, evRel, evAbs = 1, 2, 3
	absX, absY          = 0, 1
	relWheel            = 8
	buttonLeft          = 0x110
	range1000           = 100000
)

// watchInputs reads every device there is, also those that come later.
func watchInputs(to chan<- event) {
	open := map[string]chan struct{}{}
	for {
		found, _ := filepath.Glob("/dev/input/event*") // the pattern is well-formed
		for _, name := range found {
			if gone := open[name]; gone != nil {
				select {
				case <-gone:
				default:
					continue
				}
			}
			f, err := os.Open(name)
			if err != nil {
				continue // not yet, or no longer
			}
			gone := make(chan struct{})
			open[name] = gone
			go func() { readInput(f, to); close(gone) }()
		}
		time.Sleep(200 * time.Millisecond)
	}
}

func readInput(f *os.File, to chan<- event) {
	defer func() { _ = f.Close() }()
	to <- event{device: nameOf(f)}
	most := [2]int32{maximum(f, absX), maximum(f, absY)}
	const size = 24
	b := make([]byte, size)
	for {
		if _, err := io.ReadFull(f, b); err != nil {
			return
		}
		e := event{binary.NativeEndian.Uint16(b[16:]), binary.NativeEndian.Uint16(b[18:]), int32(binary.NativeEndian.Uint32(b[20:])), ""}
		if e.kind == evAbs && e.code <= absY {
			if most[e.code] == 0 {
				continue
			}
			e.value = int32(int64(e.value) * range1000 / int64(most[e.code]))
		}
		if e.kind != 0 {
			to <- e
		}
	}
}

// nameOf a device, as its driver has it.
func nameOf(f *os.File) string {
	var name [64]byte
	const getName uintptr = 2<<30 | 64<<16 | 'E'<<8 | 0x06 // EVIOCGNAME
	if err := ioctl(f, getName, unsafe.Pointer(&name[0])); err != nil {
		return f.Name()
	}
	text, _, _ := strings.Cut(string(name[:]), "\x00")
	return strings.ReplaceAll(text, " ", "_")
}

// maximum of an axis; 0: the device has none.
func maximum(f *os.File, axis uintptr) int32 {
	var info [6]int32                             // struct input_absinfo
	const getAbs = 2<<30 | 24<<16 | 'E'<<8 | 0x40 // EVIOCGABS(0)
	if err := ioctl(f, getAbs+axis, unsafe.Pointer(&info[0])); err != nil {
		return 0
	}
	return info[2]
}
