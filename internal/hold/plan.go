package hold

import (
	"encoding/binary"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mostPTYs of a sandbox.
const mostPTYs = 64

// The mount plan: what PID 1 does to get its root, one operation after the
// other; "mount plan" in docs/formats/hold.md.
const (
	planRoot = iota + 1
	planDir
	planFile
	planAttach
	planFS
	planMask
	planReadOnly
	planWrite
	planLo
	planHostname
	planMove
	planShm

	planOptional  = 1
	planNoLinks   = 2
	planDirectory = 4

	maxPlan = 60 << 10
)

const walled = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// plan collects operations, the descriptors they name, and what each is in
// words, for errors.
type plan struct {
	b     []byte
	files []*os.File
	words []string
	kinds []uint8
}

// operation is one entry of a plan without its texts.
type operation struct {
	kind, flags uint8
	file        *os.File
	attr        uint32
	words       string
}

func (p *plan) op(o operation, texts ...string) {
	fd := 0xffff
	if o.file != nil {
		fd = p.file(o.file)
	}
	s1, s2 := "", ""
	if len(texts) > 0 {
		s1 = texts[0] + "\x00"
	}
	if len(texts) > 1 {
		s2 = texts[1] + "\x00"
	}
	p.b = append(p.b, o.kind, o.flags)
	p.b = binary.LittleEndian.AppendUint16(p.b, uint16(fd))
	p.b = binary.LittleEndian.AppendUint32(p.b, o.attr)
	p.b = binary.LittleEndian.AppendUint32(p.b, uint32(len(s1)))
	p.b = binary.LittleEndian.AppendUint32(p.b, uint32(len(s2)))
	p.b = append(append(p.b, s1...), s2...)
	for len(p.b)%8 != 0 {
		p.b = append(p.b, 0)
	}
	p.words, p.kinds = append(p.words, o.words), append(p.kinds, o.kind)
}

func (p *plan) file(f *os.File) int {
	for i, have := range p.files {
		if have == f {
			return i
		}
	}
	p.files = append(p.files, f)
	return len(p.files) - 1
}

func (p *plan) dir(at string, mode uint32) {
	p.op(operation{kind: planDir, attr: mode, words: "make directory " + at}, at)
}

func (p *plan) parents(at string) {
	for i := 1; i < len(at); i++ {
		if at[i] == '/' {
			p.dir(at[:i], 0o755)
		}
	}
}

func (p *plan) attach(f *os.File, at string, flags uint8) {
	p.op(operation{kind: planAttach, flags: flags, file: f, words: "mount " + at}, at)
}

func (p *plan) fs(kind, at string, attr uint32, options ...string) {
	p.op(operation{kind: planFS, attr: attr, words: "mount " + kind + " " + at}, at, strings.Join(append([]string{kind}, options...), "\x00"))
}

// prepared are the places of what a shell has before it has a root, by the
// number that planMove takes.
var prepared = []string{"/dev", "/proc", "/sys"}

// shellMounts are the file systems a shell is prepared with; nil: none.
type shellMounts struct{ dev, proc, sys *os.File }

// preparePlan makes what needs no root.
func preparePlan(s *SpawnSpec, m shellMounts) (*plan, error) {
	p := &plan{}
	p.attach(m.proc, "/proc", planNoLinks)
	if m.sys != nil {
		p.attach(m.sys, "/sys", planNoLinks)
	}
	if m.dev != nil {
		p.attach(m.dev, "/dev", planNoLinks)
		p.op(operation{kind: planShm, words: "mount /dev/shm"})
		// The machine has some thousands for all; each sandbox gets its part.
		pts := []string{"ptmxmode=0666", "mode=0620", "max=" + strconv.Itoa(mostPTYs)}
		if s.Count > 5 {
			pts = append(pts, "gid=5")
		}
		p.fs("devpts", "/dev/pts", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC, pts...)
		p.fs("mqueue", "/dev/mqueue", walled|unix.MOUNT_ATTR_NOEXEC)
	}
	if s.Lo {
		p.op(operation{kind: planLo, words: "bring lo up"})
	}
	for _, c := range s.Sysctls {
		p.op(operation{kind: planWrite, words: "set sysctl " + c.Path}, path.Join("/proc/sys", path.Clean("/"+c.Path)), c.Value)
	}
	for _, at := range s.ReadOnly {
		p.op(operation{kind: planReadOnly, flags: planOptional, words: "make read-only " + at}, at)
	}
	for _, at := range s.Masks {
		flags := uint8(planOptional)
		switch st, err := os.Stat(at); { // this kernel's proc, and so the same as the sandbox's
		case err != nil:
			continue
		case st.IsDir():
			flags |= planDirectory
		}
		p.op(operation{kind: planMask, flags: flags, words: "mask " + at}, at)
	}
	return p, p.check()
}

// enterPlan moves what was prepared into a root.
func enterPlan(e *wireEnter, root *os.File, mounts []*os.File, isDir []bool, has [3]bool) (*plan, error) {
	p := &plan{}
	p.op(operation{kind: planRoot, file: root, words: "enter root"})
	for i, at := range prepared {
		if has[i] {
			p.dir(at, 0o755)
			p.op(operation{kind: planMove, attr: uint32(i), words: "mount " + at}, at)
		}
	}
	if e.Hostname != "" {
		p.op(operation{kind: planHostname, words: "set hostname " + e.Hostname}, e.Hostname)
	}
	for i, m := range e.Mounts {
		if err := p.extra(m, mounts[i], isDir[i]); err != nil {
			return nil, err
		}
	}
	return p, p.check()
}

func (p *plan) check() error {
	if len(p.b) > maxPlan || len(p.files) > 32 {
		return fmt.Errorf("plan of %d bytes and %d descriptors is too long", len(p.b), len(p.files))
	}
	return nil
}

func (p *plan) extra(m wireMount, source *os.File, isDir bool) error {
	at := path.Clean(m.Target)
	if !strings.HasPrefix(m.Target, "/") || at == "/" {
		return fmt.Errorf("mount target %q is not an absolute path below /", m.Target)
	}
	p.parents(at)
	if isDir {
		p.dir(at, 0o755)
	} else {
		p.op(operation{kind: planFile, words: "make file " + at}, at)
	}
	if source != nil {
		p.attach(source, at, 0)
		return nil
	}
	attr := uint32(walled)
	if !m.Exec {
		attr |= unix.MOUNT_ATTR_NOEXEC
	}
	if m.RO {
		attr |= unix.MOUNT_ATTR_RDONLY
	}
	mode := m.Mode
	if mode == 0 {
		mode = 0o1777
	}
	p.fs("tmpfs", at, attr, fmt.Sprintf("mode=%o", mode), fmt.Sprintf("size=%d", m.Size))
	return nil
}
