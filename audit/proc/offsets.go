package proc

import (
	"fmt"

	"github.com/cilium/ebpf/btf"
)

// offsets is where this kernel has what the program tells of a process, from its own
// description of its types. Nothing is taken from another kernel's.
type offsets struct {
	mm, realParent, leader, pid, tgid, cred int16 // in a task
	argStart, argEnd                        int16 // in its mm
	level, numbers                          int16 // in a pid
	number, numberSize                      int16 // in one of its numbers, and of one
	uid                                     int16 // in credentials
	asked                                   int16 // in what is started: the address of the path that was asked for

	open bool // the verifier lets a program load any of the numbers, and not only the first
}

// kernelOffsets errs if the kernel does not describe itself, or not as expected.
func kernelOffsets() (o offsets, err error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return o, err
	}
	return offsetsOf(spec)
}

// want is a member as the program reads it: by so many bytes, or as a pointer to a struct.
type want struct {
	at           *int16
	in, name, to string
	size         uint32
}

func offsetsOf(spec *btf.Spec) (o offsets, err error) {
	for _, w := range []want{
		{at: &o.mm, in: "task_struct", name: "mm", to: "mm_struct"},
		{at: &o.realParent, in: "task_struct", name: "real_parent", to: "task_struct"},
		{at: &o.leader, in: "task_struct", name: "group_leader", to: "task_struct"},
		{at: &o.pid, in: "task_struct", name: "thread_pid", to: "pid"},
		{at: &o.cred, in: "task_struct", name: "real_cred", to: "cred"},
		{at: &o.tgid, in: "task_struct", name: "tgid", size: 4},
		{at: &o.argStart, in: "mm_struct", name: "arg_start", size: 8},
		{at: &o.argEnd, in: "mm_struct", name: "arg_end", size: 8},
		{at: &o.level, in: "pid", name: "level", size: 4},
		{at: &o.number, in: "upid", name: "nr", size: 4},
		{at: &o.uid, in: "cred", name: "uid", size: 4},
		{at: &o.asked, in: "linux_binprm", name: "exec", size: 8},
	} {
		if *w.at, err = w.offset(spec); err != nil {
			return o, err
		}
	}
	return o, o.array(spec)
}

func (w want) offset(spec *btf.Spec) (int16, error) {
	var s *btf.Struct
	if err := spec.TypeByName(w.in, &s); err != nil {
		return 0, err
	}
	m, at, ok := member(s.Members, w.name, 0)
	if !ok {
		return 0, fmt.Errorf("struct %s has no %s", w.in, w.name)
	}
	if w.to != "" {
		p, ok := btf.As[*btf.Pointer](m.Type)
		if ok {
			var to *btf.Struct
			to, ok = btf.As[*btf.Struct](p.Target)
			ok = ok && to.Name == w.to
		}
		if !ok {
			return 0, fmt.Errorf("%s of struct %s is no pointer to a %s", w.name, w.in, w.to)
		}
	} else if n, err := btf.Sizeof(m.Type); err != nil || uint32(n) != w.size || m.BitfieldSize != 0 {
		return 0, fmt.Errorf("%s of struct %s has not %d bytes", w.name, w.in, w.size)
	}
	return short(at)
}

// array finds the numbers of a pid, one for each level of pid namespaces.
func (o *offsets) array(spec *btf.Spec) error {
	var pid, upid *btf.Struct
	if err := spec.TypeByName("pid", &pid); err != nil {
		return err
	}
	if err := spec.TypeByName("upid", &upid); err != nil {
		return err
	}
	m, at, ok := member(pid.Members, "numbers", 0)
	array, isArray := btf.As[*btf.Array](m.Type)
	if !ok || !isArray || upid.Size == 0 || upid.Size > 1<<8 {
		return fmt.Errorf("struct pid has no array of numbers")
	}
	if of, ok := btf.As[*btf.Struct](array.Type); !ok || of.Name != "upid" {
		return fmt.Errorf("the numbers of struct pid are no upid")
	}
	o.open, o.numberSize = array.Nelems == 0, int16(upid.Size)
	var err error
	o.numbers, err = short(at)
	return err
}

// mostOffset leaves room for what is added to one: the numbers of the deepest level that is told.
const mostOffset = 1<<15 - 1<<12

func short(bytes uint32) (int16, error) {
	if bytes > mostOffset {
		return 0, fmt.Errorf("an offset of %d bytes cannot be loaded from", bytes)
	}
	return int16(bytes), nil
}

// member finds one by name, also in structs and unions without a name.
func member(members []btf.Member, name string, base uint32) (btf.Member, uint32, bool) {
	for _, m := range members {
		at := base + m.Offset.Bytes()
		if m.Name == name {
			return m, at, true
		}
		if m.Name != "" {
			continue
		}
		var inner []btf.Member
		if s, ok := btf.As[*btf.Struct](m.Type); ok {
			inner = s.Members
		} else if u, ok := btf.As[*btf.Union](m.Type); ok {
			inner = u.Members
		}
		if found, at, ok := member(inner, name, at); ok {
			return found, at, true
		}
	}
	return btf.Member{}, 0, false
}
