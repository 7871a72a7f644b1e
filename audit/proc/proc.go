// Package proc witnesses every program that is started in a sandbox.
//
// # Mechanism
//
// A BPF program on the tracepoint sched_process_exec tells, at the moment of the start,
// the process, its real ids, its control group and its command name; and, where the kernel
// describes its types (BTF), the arguments, the path that was asked for, the number in the process's
// own pid namespace, and its parent. Those it takes from the task by typed loads, which the verifier
// checks, and from the new program's memory, where the kernel has just put them. It
// needs no helper that reads kernel memory where the kernel's types let the numbers be loaded, so
// a locked down kernel takes it. Where any of this is refused, a program without it runs. Whose process it is follows from
// the uid: no process of a sandbox can have one outside of the range its user namespace
// maps, and nothing else of the machine has one inside. The kernel's proc connector would
// need no program, but by its documentation it tells of every process of the machine, by
// number alone: one that ended before it was looked at belongs to nobody. It was not tried.
//
// # Promises
//
// Each start is one record, up to mostStarts in a second for each sandbox; more, and what finds no
// room while nobody reads, is counted by the program itself and told with a record
// of kind lost of that sandbox. Program, map and ring are kept by the Keeper, so that
// starts are told also if this process is not there.
//
// Arguments, numbers and parent are those of the moment of the start, however short the
// program. What the program could not tell (no BTF, a page that was not there, more than half of
// the ring in use, a pid namespace deeper than 4) is read from /proc afterwards, or is not known.
//
// Which file was started is always read from /proc afterwards. If the process has ended or
// started another program by then, Exe is '~' and the path as execve was asked for it, else (by
// descriptor, or not told) the command name. So it is, too, if a process became another program of
// the same command name before this was told: which of both /proc told of is not known. That is no proof of any file: a link or a
// script may have been there, another root, or nothing any more.
//
// Not seen: programs inside of virtual machines, and code that runs without a start,
// like what an interpreter reads or a library that is loaded.
package proc

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/procinfo"
)

// Config of a Witness.
type Config struct {
	Keeper audit.Keeper
	Name   string // of what is kept; of this dsec on the machine
	Base   uint32 // first uid of all sandboxes
	Take   func(dsec.SandboxID, ...dsec.AuditRecord)
	Cache  *procinfo.Cache // is told of each process
	Log    *slog.Logger

	form form // of the program, for tests
}

// form is by what the program tells more than helpers do: what the kernel lets it.
type form int

const (
	byLoads  form = iota // typed ones
	byHelper             // the numbers by a helper: struct pid has an array of one, as in kernels up to about 6.4
	byProc               // nothing: the kernel does not describe its types
)

// Witness implements audit.Witness.
type Witness struct {
	cfg    Config
	kept   *kept
	reader *ringbuf.Reader
	groups *groups
	done   sync.WaitGroup
	stop   chan struct{}

	mu      sync.Mutex
	by      map[uint32]*subject // by number of the range
	ranges  map[dsec.SandboxID]uint32
	leaving map[dsec.SandboxID]bool // in Remove
	drained *sync.Cond              // on mu: all there was is read, or nobody reads
	rounds  int
	reading bool
}

type subject struct {
	id     dsec.SandboxID
	uid    uint32
	prefix string // of its root, in links
}

var (
	_ audit.Witness        = (*Witness)(nil)
	_ audit.CommandWitness = (*Witness)(nil)
)

// idsOf is the number of uids of a sandbox, as a shift.
const idsOf = 16

// Open takes over what is kept, or loads it. It errs with Unsupported if the machine
// cannot. Nothing is read before Start.
func Open(ctx context.Context, c Config) (*Witness, error) {
	const op = "watch processes"
	if err := ownsPIDs(); err != nil {
		return nil, dsec.E(dsec.Unsupported, op, c.Name, err)
	}
	k, err := openKept(ctx, c)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, op, c.Name, err)
	}
	r, err := ringbuf.NewReader(k.ring)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, c.Name, errors.Join(err, k.close()))
	}
	w := &Witness{cfg: c, kept: k, reader: r, groups: openGroups(), stop: make(chan struct{}),
		by: map[uint32]*subject{}, ranges: map[dsec.SandboxID]uint32{}, leaving: map[dsec.SandboxID]bool{}}
	w.drained = sync.NewCond(&w.mu)
	return w, nil
}

// firstPIDs is the inode of the first pid namespace, the one the program counts in.
const firstPIDs = "pid:[4026531836]"

func ownsPIDs() error {
	ns, err := os.Readlink("/proc/self/ns/pid")
	if err == nil && ns != firstPIDs {
		err = errors.New("this process is in a pid namespace of its own, so it cannot find the processes it is told of")
	}
	return err
}

// Start begins to read, when all sandboxes of an earlier process have been added;
// what is kept of others is forgotten.
func (w *Witness) Start() error {
	w.mu.Lock()
	err := w.kept.forgetOthers(func(n uint32) bool { return w.by[n] != nil })
	w.mu.Unlock()
	if err != nil {
		return dsec.E(dsec.Internal, "watch processes", w.cfg.Name, err)
	}
	w.mu.Lock()
	w.reading = true
	w.mu.Unlock()
	w.done.Go(w.read)
	w.done.Go(w.count)
	return nil
}

// Close ends the reading only: starts are still kept for the next process.
func (w *Witness) Close() error {
	close(w.stop)
	err := w.reader.Flush() // wakes who reads; it is closed when nobody does
	w.done.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	err = errors.Join(err, w.reader.Close())
	return errors.Join(err, w.groups.close(), w.kept.close())
}

// Add implements audit.Witness.
func (w *Witness) Add(_ context.Context, s audit.Subject, adopted bool) error {
	const op = "watch processes"
	if s.UID < w.cfg.Base {
		return dsec.Errorf(dsec.Internal, op, string(s.ID), "its uids from %d are below %d", s.UID, w.cfg.Base)
	}
	n := (s.UID - w.cfg.Base) >> idsOf
	x := &subject{id: s.ID, uid: s.UID, prefix: prefixOf(s.Root)}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.by[n], w.ranges[s.ID] = x, n
	if err := w.kept.add(n, adopted); err != nil {
		delete(w.by, n)
		delete(w.ranges, s.ID)
		return dsec.E(dsec.Internal, op, string(s.ID), err)
	}
	if adopted && w.kept.older {
		w.cfg.Take(s.ID, audit.Lost(0, "programs that were started while the agent was away: the version before this one kept them"))
	}
	return nil
}

// prefixOf is what the links of files in a root begin with.
func prefixOf(root *os.File) string {
	if root == nil {
		return ""
	}
	p, err := procinfo.Link(int(root.Fd()))
	if err != nil || p == "/" {
		return ""
	}
	return p
}

// Remove implements audit.Witness.
func (w *Witness) Remove(_ context.Context, id dsec.SandboxID, _ *os.File) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, ok := w.ranges[id]
	if !ok {
		return
	}
	w.leaving[id] = true
	defer delete(w.leaving, id)
	w.settleLocked()
	w.lostLocked(n, w.by[n])
	if err := w.kept.remove(n); err != nil {
		w.cfg.Log.Error("sandbox not taken from the watched", "sandbox", id, "err", err)
	}
	delete(w.by, n)
	delete(w.ranges, id)
}

// settleLocked waits until what is in the ring now was read. A flush has the reader
// say so when it has; one may have been on its way already, so there are two.
func (w *Witness) settleLocked() {
	for range 2 {
		if !w.reading || w.stopped() || w.reader.Flush() != nil {
			return
		}
		for round := w.rounds; w.rounds == round && w.reading; {
			w.drained.Wait()
		}
	}
}

func (w *Witness) stopped() bool {
	select {
	case <-w.stop:
		return true
	default:
		return false
	}
}

const (
	batch  = 256                   // records that are written at once, at most
	linger = 10 * time.Millisecond // they wait for more
)

// read takes what the ring has until it is closed.
func (w *Witness) read() {
	var rec ringbuf.Record
	pending := newTellings(w.groups, w.cfg.Take)
	defer func() {
		w.mu.Lock()
		w.reading = false
		w.mu.Unlock()
		w.drained.Broadcast()
	}()
	for waits := false; ; {
		err := w.reader.ReadInto(&rec)
		if err == nil {
			if e, ok := decode(rec.RawSample); ok {
				if x, ok := w.record(e); ok {
					pending.add(x)
					if !waits {
						waits = true
						w.reader.SetDeadline(time.Now().Add(linger))
					}
				}
			}
		}
		if err == nil && pending.count < batch && !w.stopped() {
			continue
		}
		flushed := errors.Is(err, ringbuf.ErrFlushed)
		now := time.Now()
		pending.deliver(now, w.leaves)
		if w.stopped() {
			return
		}
		if waits = len(pending.late) > 0; waits {
			w.reader.SetDeadline(now.Add(linger))
		} else {
			w.reader.SetDeadline(time.Time{})
		}
		if flushed {
			w.mu.Lock()
			w.rounds++
			w.mu.Unlock()
			w.drained.Broadcast()
		} else if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			w.cfg.Log.Error("starts of programs not read", "err", err)
		}
	}
}

// leaves reports whether a sandbox is being removed; all are if we end.
func (w *Witness) leaves(id dsec.SandboxID) bool {
	if w.stopped() {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.leaving[id]
}

// Command implements audit.CommandWitness.
func (w *Witness) Command(group uint64, exec string) { w.groups.say(group, exec) }

// count tells once in a while how many starts were not told.
func (w *Witness) count() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-w.stop:
			w.drained.Broadcast()
			return
		}
		w.mu.Lock()
		for n, s := range w.by {
			w.lostLocked(n, s)
		}
		w.mu.Unlock()
	}
}

func (w *Witness) lostLocked(n uint32, s *subject) {
	missed, err := w.kept.missed(n)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		w.cfg.Log.Error("starts that were not told cannot be counted", "sandbox", s.id, "err", err)
	}
	if missed > 0 {
		w.cfg.Take(s.id, audit.Lost(int64(missed), "programs were started faster than they are told, or while nobody read"))
	}
}
