package hold

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Refusal is one kind of system call that was refused with notice, and how often. All
// but Count and Last is of the first call; the kernel's word, except for Args.
type Refusal struct {
	Sandbox string
	Exec    string // the command that the process descends from
	Exe     string // program of the process; "": not known
	PID     int    // inside; 0: not known
	UID     int64  // real one, inside; -1: not known
	GID     int64
	Call    int64 // number of the call; -1: calls of kinds there was no room for
	Errno   int   // what was answered
	Clause  int   // of the filter
	Arg     int   // which argument says what was wanted, -1: none; all of the kind have the same low half of it
	Args    [6]uint64
	Count   int64
	First   time.Time
	Last    time.Time
}

// Caps of what is kept until it is written down.
const (
	kindsPerSandbox = 256
	kindsInAll      = 16384
	maxExe          = 1024 // bytes
	otherKinds      = -1
)

type refusalKind struct {
	sandbox, exec, exe string
	uid, call          int64
	clause             int
	value              uint32
}

func (r *Refusal) kind() refusalKind {
	if r.Call == otherKinds {
		return refusalKind{sandbox: r.Sandbox, call: otherKinds}
	}
	k := refusalKind{sandbox: r.Sandbox, exec: r.Exec, exe: r.Exe, uid: r.UID, call: r.Call, clause: r.Clause}
	if r.Arg >= 0 && r.Arg < len(r.Args) {
		k.value = uint32(r.Args[r.Arg])
	}
	return k
}

// refusalBatch is what one answer has.
type refusalBatch struct {
	Number uint64
	List   []Refusal
}

// refusals keeps them until a client has written them down. It outlives sandboxes.
type refusals struct {
	mu    sync.Mutex
	kinds map[refusalKind]*Refusal
	count map[string]int // kinds of a sandbox
	batch refusalBatch   // told to a client, and not known to be written
	said  bool           // the client knows that there are some
}

func newRefusals() *refusals {
	return &refusals{kinds: map[refusalKind]*Refusal{}, count: map[string]int{}}
}

// add counts a refusal. True: the client is to be told that there are some.
func (x *refusals) add(r Refusal) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.addLocked(r)
	first := !x.said
	x.said = true
	return first
}

func (x *refusals) addLocked(r Refusal) {
	k := r.kind()
	if x.kinds[k] == nil && (x.count[r.Sandbox] >= kindsPerSandbox || len(x.kinds) >= kindsInAll) && r.Call != otherKinds {
		r = Refusal{Sandbox: r.Sandbox, UID: -1, GID: -1, Call: otherKinds, Arg: -1, Count: r.Count, First: r.First, Last: r.Last}
		k = r.kind()
	}
	if old := x.kinds[k]; old != nil {
		old.Count += r.Count
		old.Last = r.Last
		return
	}
	if r.Call == otherKinds && len(x.kinds) >= 2*kindsInAll {
		return // so many sandboxes: nobody has come for a long time
	}
	x.kinds[k] = &r
	x.count[r.Sandbox]++
}

func (x *refusals) any() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.said = len(x.kinds) > 0 || len(x.batch.List) > 0
	return x.said
}

// take forgets the batch of that number and returns the next, or again one that
// was not written.
func (x *refusals) take(written uint64) refusalBatch {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.said = false
	if written == x.batch.Number {
		x.batch.List = nil
	}
	if x.batch.List == nil && len(x.kinds) > 0 {
		x.batch = refusalBatch{Number: x.batch.Number + 1, List: x.listLocked()}
		clear(x.kinds)
		clear(x.count)
	}
	return x.batch
}

func (x *refusals) listLocked() []Refusal {
	list := make([]Refusal, 0, len(x.kinds))
	for _, r := range x.kinds {
		list = append(list, *r)
	}
	slices.SortFunc(list, func(a, b Refusal) int {
		return cmp.Or(a.First.Compare(b.First), cmp.Compare(a.Sandbox, b.Sandbox), cmp.Compare(a.Call, b.Call), cmp.Compare(a.Clause, b.Clause), cmp.Compare(a.Exe, b.Exe))
	})
	return list
}

// state is the batch and what comes after it.
func (x *refusals) state() (refusalBatch, []Refusal) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.batch, x.listLocked()
}

func (x *refusals) restore(b refusalBatch, list []Refusal) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.batch = b
	for _, r := range list {
		x.addLocked(r)
	}
}
