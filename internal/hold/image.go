package hold

import (
	"encoding/binary"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The exec image is what the C program needs to become a command, flat and
// ready to be used where it lies; "exec image" in docs/formats/hold.md.
const (
	imageMagic  = 0x32586d49
	imageNNP    = 1
	imagePTY    = 2
	imageFile   = 4
	imageNotice = 8
	imageHeader = 128
	imageFlags  = 8  // where they are
	imageFilter = 72 // where its number of instructions and its offset are

	joinAll = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS |
		unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP
	joinFiles = unix.CLONE_NEWUSER | unix.CLONE_NEWNS

	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// execImage is what goes into an image.
type execImage struct {
	flags, join uint32
	uid, gid    uint32
	groups      []uint32
	caps        Caps
	seccomp     []byte
	rlimits     []Rlimit
	landlock    *Landlock
	umask       uint32
	cwd         string
	oom         int
	argv, env   []string
	apparmor    string // profile; "" is none
	paths       []string
	rows, cols  uint16
}

type imageBuilder struct{ b []byte }

func (w *imageBuilder) align() {
	for len(w.b)%8 != 0 {
		w.b = append(w.b, 0)
	}
}

func (w *imageBuilder) text(s string) uint32 {
	off := len(w.b)
	w.b = append(append(w.b, s...), 0)
	return uint32(off)
}

// strings writes the texts and an array of their offsets.
func (w *imageBuilder) strings(list []string) uint32 {
	offs := make([]uint32, len(list))
	for i, s := range list {
		offs[i] = w.text(s)
	}
	w.align()
	at := len(w.b)
	for _, o := range offs {
		w.b = binary.LittleEndian.AppendUint64(w.b, uint64(o))
	}
	w.b = binary.LittleEndian.AppendUint64(w.b, 0)
	return uint32(at)
}

func (e *execImage) encode() []byte {
	w := &imageBuilder{b: make([]byte, imageHeader)}
	groups := uint32(len(w.b))
	for _, g := range e.groups {
		w.b = binary.LittleEndian.AppendUint32(w.b, g)
	}
	w.align()
	filter := uint32(len(w.b))
	w.b = append(w.b, e.seccomp...)
	w.align()
	rlimits := uint32(len(w.b))
	for _, r := range e.rlimits {
		w.b = binary.LittleEndian.AppendUint64(w.b, uint64(uint32(r.Resource)))
		w.b = binary.LittleEndian.AppendUint64(w.b, r.Cur)
		w.b = binary.LittleEndian.AppendUint64(w.b, r.Max)
	}
	rules := e.landlock.encode(w)
	cwd := w.text(e.cwd)
	oom := w.text(strconv.Itoa(e.oom))
	argv, env, paths := w.strings(e.argv), w.strings(e.env), w.strings(e.paths)
	apparmor := uint32(0)
	if e.apparmor != "" {
		apparmor = w.text("exec " + e.apparmor)
	}
	effective := e.caps.Ambient
	if e.uid == 0 {
		effective = e.caps.Permitted
	}
	h := make([]byte, 0, imageHeader)
	u32 := func(vs ...uint32) {
		for _, v := range vs {
			h = binary.LittleEndian.AppendUint32(h, v)
		}
	}
	u32(imageMagic, uint32(len(w.b)), e.flags, e.join, e.uid, e.gid, uint32(len(e.groups)), groups)
	for _, c := range []uint64{e.caps.Bounding, e.caps.Permitted | e.caps.Ambient, e.caps.Inheritable | e.caps.Ambient, e.caps.Ambient, effective} {
		h = binary.LittleEndian.AppendUint64(h, c)
	}
	u32(uint32(len(e.seccomp)/8), filter, uint32(len(e.rlimits)), rlimits, e.umask, rules, cwd, oom, argv, env, paths, apparmor)
	h = binary.LittleEndian.AppendUint16(h, e.rows)
	h = binary.LittleEndian.AppendUint16(h, e.cols)
	copy(w.b, h)
	return w.b
}

// encode writes what is handled, and pairs of accesses and the offset of a path; 0
// ends them. Its offset is 0 if there is none.
func (l *Landlock) encode(w *imageBuilder) uint32 {
	if l == nil {
		return 0
	}
	offs := make([]uint32, len(l.Rules))
	for i, r := range l.Rules {
		offs[i] = w.text(r.Path)
	}
	w.align()
	at := len(w.b)
	w.b = binary.LittleEndian.AppendUint64(w.b, l.Handled)
	for i, r := range l.Rules {
		if r.Access != 0 {
			w.b = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(w.b, r.Access), uint64(offs[i]))
		}
	}
	w.b = binary.LittleEndian.AppendUint64(w.b, 0)
	return uint32(at)
}

// notice is the filter of an image that is to have a listener; nil: it is not.
func notice(image []byte) []byte {
	if len(image) < imageHeader || image[imageFlags]&imageNotice == 0 {
		return nil
	}
	n, off := binary.LittleEndian.Uint32(image[imageFilter:]), binary.LittleEndian.Uint32(image[imageFilter+4:])
	if n > 4096 || uint64(off)+8*uint64(n) > uint64(len(image)) {
		return nil
	}
	return image[off : off+8*n]
}

// candidates are the paths to try for a program, as execvp does.
func candidates(program string, env []string) []string {
	if strings.Contains(program, "/") {
		return []string{program}
	}
	if program == "" {
		return nil
	}
	path := defaultPath
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	var list []string
	for dir := range strings.SplitSeq(path, ":") {
		if dir == "" {
			dir = "."
		}
		list = append(list, strings.TrimSuffix(dir, "/")+"/"+program)
	}
	return list
}
