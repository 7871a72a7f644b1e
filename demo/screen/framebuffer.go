package main

import (
	"encoding/binary"
	"errors"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of the framebuffer and the console.
const (
	getVariable = 0x4600 // FBIOGET_VSCREENINFO
	getFixed    = 0x4602 // FBIOGET_FSCREENINFO
	setMode     = 0x4b3a // KDSETMODE
	graphics    = 1
)

// framebuffer is a screen of 32 bits a pixel, and what is to be on it.
type framebuffer struct {
	width, height int
	stride        int // bytes of a line
	screen        []byte
	next          []byte
}

// openFramebuffer waits for the driver.
func openFramebuffer(wait time.Duration) (*framebuffer, error) {
	var f *os.File
	var err error
	for end := time.Now().Add(wait); ; time.Sleep(50 * time.Millisecond) {
		if f, err = os.OpenFile("/dev/fb0", os.O_RDWR, 0); err == nil {
			break
		}
		if time.Now().After(end) {
			return nil, err
		}
	}
	defer func() { _ = f.Close() }()
	var variable [160]byte // struct fb_var_screeninfo
	var fixed [80]byte     // struct fb_fix_screeninfo
	if err := ioctl(f, getVariable, unsafe.Pointer(&variable[0])); err != nil {
		return nil, err
	}
	if err := ioctl(f, getFixed, unsafe.Pointer(&fixed[0])); err != nil {
		return nil, err
	}
	number := func(b []byte, at int) int { return int(binary.NativeEndian.Uint32(b[at:])) }
	fb := &framebuffer{width: number(variable[:], 0), height: number(variable[:], 4), stride: number(fixed[:], 48)}
	if bits := number(variable[:], 24); bits != 32 {
		return nil, errors.New("the framebuffer has not 32 bits a pixel")
	}
	if fb.screen, err = unix.Mmap(int(f.Fd()), 0, fb.stride*fb.height, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, os.NewSyscallError("mmap /dev/fb0", err)
	}
	fb.next = make([]byte, len(fb.screen))
	// The kernel's own text would be drawn over ours.
	if tty, err := os.OpenFile("/dev/tty0", os.O_RDWR|unix.O_NOCTTY, 0); err == nil {
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, tty.Fd(), setMode, graphics) // without a console there is no text either
		_ = tty.Close()
	}
	return fb, nil
}

func ioctl(f *os.File, request uintptr, at unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(at)); errno != 0 {
		return os.NewSyscallError("ioctl "+f.Name(), errno)
	}
	return nil
}

// rectangle fills one; what is outside of the screen is left out.
func (fb *framebuffer) rectangle(x0, y0, x1, y1 int, color uint32) {
	x0, y0, x1, y1 = max(x0, 0), max(y0, 0), min(x1, fb.width), min(y1, fb.height)
	for y := y0; y < y1; y++ {
		line := fb.next[y*fb.stride:]
		for x := x0; x < x1; x++ {
			binary.NativeEndian.PutUint32(line[4*x:], color)
		}
	}
}

// text draws letters twice as large as the font has them.
func (fb *framebuffer) text(f *font, x, y int, s string, color uint32) {
	for _, r := range s {
		for row, bits := range f.glyph(r) {
			for col := range 8 {
				if bits&(0x80>>col) != 0 {
					fb.rectangle(x+2*col, y+2*row, x+2*col+2, y+2*row+2, color)
				}
			}
		}
		x += 16
	}
}

// show puts what was drawn on the screen.
func (fb *framebuffer) show() { copy(fb.screen, fb.next) }
