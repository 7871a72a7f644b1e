package precontent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer/ondemand/journal"
)

// Source has the bytes of a data file.
type Source interface {
	// Ensure returns when the range is in the file.
	Ensure(ctx context.Context, off, n int64) error
}

// All ensures a range in each of several files.
type All []Source

// Ensure implements Source.
func (a All) Ensure(ctx context.Context, off, n int64) error {
	errs := make([]error, len(a))
	var all sync.WaitGroup
	for i, s := range a {
		all.Go(func() { errs[i] = s.Ensure(ctx, off, n) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// session answers the events of one group.
type session struct {
	group *os.File
	j     *journal.Journal
	find  func(dev, ino uint64) Source
	// refused tells of reads that are errors without a source having said so.
	refused func(ctx context.Context, dev, ino uint64, err error)
	pid     int32
	busy    sync.WaitGroup
	idle    chan int // free slots
	fail    context.CancelCauseFunc

	mu   sync.Mutex
	left []int32 // descriptors of events that are not answered
}

// Serve answers the events of a group until ctx ends. It owns neither file, and
// begins when the process that served before has ended. A read is allowed when
// Ensure of its file has returned nil, and is EIO for the reader otherwise.
//
// find says what has the data of a file, by device and inode (see ID). It is
// called once for each event, concurrently, and may wait, for example until the
// layers are open again, but not longer than ctx. Where there is no source a
// read is EIO. A file needs its source as long as it is mounted, also when it is
// whole: events may be on their way when it is unmarked.
//
// # What a killed process leaves
//
// What it took and did not answer is served first. An event is known by the
// number of a descriptor in the process that read it, and only by that; so that
// no new event is known by the number of an old one, and gets its answer, those
// numbers are kept free of new ones. Those that are in use in this process by
// something else cannot be: their events are answered before a new one is read.
// Call Serve before much is open.
//
// Between taking an event and noting of which file it is there is a moment in
// which a process can be killed. Then find is asked for (0, 0): what it returns
// has to ensure the range in every file that is marked (All does); nil is EIO.
//
// # What no source knows of
//
// A read may also be EIO because nobody has the file, because an event cannot be
// understood or its file cannot be told, or because this process had no descriptor
// left for it, which the kernel answers itself. Then refused is called, with the
// file if it is known, else (0, 0): the read may have been of any that is marked. It
// is called concurrently and may wait, but not longer than ctx; the reader is told
// when it returns, unless the kernel has told it already.
//
// Reads and writes of this process are never waited for, so it must not read
// what it serves.
func Serve(ctx context.Context, group, events *os.File, find func(dev, ino uint64) Source,
	refused func(ctx context.Context, dev, ino uint64, err error)) error {
	const op = "serve pre-content events"
	if err := journal.Pollable(group); err != nil {
		return dsec.E(dsec.Invalid, op, group.Name(), err)
	}
	j, err := journal.Open(ctx, events, shape)
	if err != nil {
		return err
	}
	s := &session{group: group, j: j, find: find, refused: refused, pid: int32(os.Getpid()), idle: make(chan int, shape.Slots)}
	ctx, s.fail = context.WithCancelCause(ctx)
	defer func() {
		s.fail(nil)
		s.busy.Wait()
		// Only now, when no event is read any more that could get such a number.
		for _, fd := range s.left {
			_ = unix.Close(int(fd))
		}
		j.Close()
	}()
	used := s.resume(ctx)
	for i := range usable() {
		if !used[i] {
			s.idle <- i
		}
	}
	if err := s.loop(ctx); err != ctx.Err() {
		return dsec.E(dsec.Internal, op, "", err)
	}
	return context.Cause(ctx)
}

// usable is how many events may be taken at one time: each is a descriptor, and
// an event for which there is none is denied by the kernel.
func usable() int {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return shape.Slots / 4
	}
	return int(min(uint64(shape.Slots), max(8, lim.Cur/2)))
}

func (s *session) loop(ctx context.Context) error {
	for {
		err := s.j.Receive(ctx, s.group, eventRoom, s.idle, func(i int) { s.taken(ctx, i) })
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
			// The event was denied. Others wait for answers that free descriptors.
			s.busy.Go(func() { s.refused(ctx, 0, 0, fmt.Errorf("read event: %w", err)) })
		default:
			return fmt.Errorf("read event: %w", err)
		}
	}
}

// taken answers a new event.
func (s *session) taken(ctx context.Context, i int) {
	e, err := parse(s.j.Slot(i))
	if err == nil && e.pid == s.pid {
		// Ours: a write of what came, which others wait for.
		s.answered(i, e.fd, allow)
		return
	}
	var st unix.Stat_t
	if err == nil {
		if err = unix.Fstat(int(e.fd), &st); err == nil {
			e.dev, e.ino = st.Dev, st.Ino
			note(s.j.Slot(i), e.dev, e.ino)
		}
	}
	s.busy.Go(func() { s.work(ctx, i, e, err, true) })
}

// errNobody is why a read is an error of whose file nobody has the bytes.
var errNobody = errors.New("a file that nobody serves")

// work answers one event, which may be one that cannot be served, unless the
// session ends first: who comes after it shall. mine says that the descriptor it is
// known by is ours.
func (s *session) work(ctx context.Context, i int, e event, err error, mine bool) {
	if err != nil {
		s.refused(ctx, 0, 0, err)
	} else {
		err = s.ensure(ctx, e)
	}
	response := uint32(allow)
	if err != nil {
		response = deny
	}
	if response == deny && ctx.Err() != nil {
		if mine {
			s.mu.Lock()
			s.left = append(s.left, e.fd)
			s.mu.Unlock()
		}
		return
	}
	if mine {
		s.answered(i, e.fd, response)
		return
	}
	s.send(e.fd, response)
	s.j.Free(i)
	s.idle <- i
}

// ensure has the bytes brought that an event is of. Why it does not is with the
// source, if that is the one of the file.
func (s *session) ensure(ctx context.Context, e event) error {
	src, err := s.find(e.dev, e.ino), errNobody
	if src != nil {
		err = src.Ensure(ctx, e.off, e.n)
	}
	if err != nil && ctx.Err() == nil && (src == nil || e.dev == 0 && e.ino == 0) {
		s.refused(ctx, e.dev, e.ino, err)
	}
	return err
}

// answered answers and gives up the number, in this order: no event may get it
// that an answer to this one could mean.
func (s *session) answered(i int, fd int32, response uint32) {
	s.send(fd, response)
	s.j.Free(i)
	if fd >= 0 {
		_ = unix.Close(int(fd))
	}
	s.idle <- i
}

// send writes an answer. The kernel knows none of a process that had answered
// and was killed before it noted that.
func (s *session) send(fd int32, response uint32) {
	if fd < 0 {
		return
	}
	if _, err := s.group.Write(answer(fd, response)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.fail(dsec.E(dsec.Internal, "answer pre-content event", "", err))
	}
}

// resume begins to answer what another process left, and returns the slots that
// are in use. It ends early with ctx: then no event may be read.
func (s *session) resume(ctx context.Context) (used map[int]bool) {
	used = map[int]bool{}
	type old struct {
		event
		err error // it cannot be understood
	}
	kept, blocked := map[int]old{}, map[int]old{}
	for _, i := range s.j.Left() {
		e, err := parse(s.j.Slot(i))
		used[i] = true
		if s.reserve(int(e.fd)) {
			kept[i] = old{e, err}
		} else {
			blocked[i] = old{e, err}
		}
	}
	// Only now, because fetching opens files, which take numbers.
	for i, e := range kept {
		s.busy.Go(func() { s.work(ctx, i, e.event, e.err, true) })
	}
	var answered sync.WaitGroup
	for i, e := range blocked {
		answered.Go(func() { s.work(ctx, i, e.event, e.err, false) })
	}
	answered.Wait()
	return used
}

// reserve opens something by that number, if nothing is.
func (s *session) reserve(number int) bool {
	raw, err := s.group.SyscallConn()
	if err != nil {
		return false
	}
	got, err := -1, error(nil)
	if e := raw.Control(func(fd uintptr) { got, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, number) }); e != nil || err != nil {
		return false
	}
	if got != number {
		_ = unix.Close(got)
	}
	return got == number
}
