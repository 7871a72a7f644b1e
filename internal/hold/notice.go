package hold

import (
	"bytes"
	"os"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/procinfo"
)

// A command's filter asks its listener, the hold, about refusals of interest. The
// answer is always the errno that the filter itself would have given: the hold can
// let nothing through. While nobody answers, who called waits, and can be killed; when
// the listener is closed, the kernel answers ENOSYS.

const (
	mostListeners = 128 // of one sandbox: background processes outlive their command
	longestPace   = time.Second
)

// listener is that of one command's filter. It lives as long as any process that has it.
type listener struct {
	sb     *sandbox
	exec   string
	f      *os.File
	filter []byte
	vigil  vigil
}

// filters of listeners, each once.
type filters struct {
	mu  sync.Mutex
	all map[string][]byte
}

// same is a copy of b that is kept for ever, the same for the same bytes: there are
// as many as profiles.
func (x *filters) same(b []byte) []byte {
	x.mu.Lock()
	defer x.mu.Unlock()
	if f := x.all[string(b)]; f != nil {
		return f
	}
	if x.all == nil {
		x.all = map[string][]byte{}
	}
	f := bytes.Clone(b)
	x.all[string(b)] = f
	return f
}

// mayNotice returns the filter of a command that gets a listener, and changes the image
// of one that does not. Filters of one profile are the same memory.
func (sb *sandbox) mayNotice(image []byte) []byte {
	filter := notice(image)
	if filter == nil {
		return nil
	}
	sb.mu.Lock()
	n := len(sb.listeners)
	sb.mu.Unlock()
	if n >= mostListeners || sb.s.listening.Load() >= int64(sb.s.most) {
		image[imageFlags] &^= imageNotice
		sb.s.notHeard(sb, "too many filters of ended commands have one")
		return nil
	}
	return sb.s.filters.same(filter)
}

// notHeard says that refusals are made, and not told: now and then.
func (s *server) notHeard(sb *sandbox, why string) {
	if n := s.unheard.Add(1); n&(n-1) == 0 {
		s.log.Warn("what the filter of a command refuses is not told", "sandbox", sb.name(), "why", why, "so far", n)
	}
}

// listen begins to answer what a filter asks.
func (sb *sandbox) listen(exec string, f *os.File, filter []byte) {
	if f == nil {
		sb.s.notHeard(sb, "the kernel gave no listener")
		return
	}
	f, err := pollableFile(f)
	if err != nil {
		sb.s.notHeard(sb, err.Error())
		return
	}
	sb.addListener(exec, f, filter).watch()
}

func (sb *sandbox) addListener(exec string, f *os.File, filter []byte) *listener {
	l := &listener{sb: sb, exec: exec, f: f, filter: filter}
	sb.s.listening.Add(1)
	sb.mu.Lock()
	sb.listeners[l] = struct{}{}
	sb.mu.Unlock()
	return l
}

// watch begins to answer, also after it was quiesced.
func (l *listener) watch() {
	l.vigil.mu.Lock()
	defer l.vigil.mu.Unlock()
	_ = l.f.SetReadDeadline(never)
	if l.vigil.on {
		return
	}
	l.vigil.on = true
	l.sb.s.watchers.enter()
	go func() {
		defer l.sb.s.watchers.leave()
		for {
			if l.serve() {
				l.close()
				return
			}
			l.vigil.mu.Lock()
			quiesced := l.sb.s.quiesced.Load()
			l.vigil.on = !quiesced
			l.vigil.mu.Unlock()
			if quiesced {
				return
			}
		}
	}()
}

// close is at the end of the last process that has the filter.
func (l *listener) close() {
	l.sb.mu.Lock()
	delete(l.sb.listeners, l)
	l.sb.mu.Unlock()
	l.sb.s.listening.Add(-1)
	_ = l.f.Close()
}

// serve answers until nobody has the filter any more, which is true, or it is quiesced.
func (l *listener) serve() bool {
	rc, err := l.f.SyscallConn()
	if err != nil {
		return true
	}
	for !l.sb.s.quiesced.Load() {
		var ends, failed bool
		err := rc.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			err := noEINTR(func() error { _, err := unix.Poll(p, 0); return err })
			asked := err == nil && p[0].Revents&unix.POLLIN != 0 // then taking it does not block
			ends = err != nil || p[0].Revents != 0 && !asked
			return asked || ends
		})
		if err != nil {
			return !os.IsTimeout(err)
		}
		if ends {
			return true
		}
		l.sb.s.breathe(l.sb)
		_ = rc.Control(func(fd uintptr) { failed = l.answer(fd) })
		if failed {
			return true
		}
	}
	return false
}

// notification is struct seccomp_notif, with room for what later kernels add.
type notification struct {
	id         uint64
	pid, flags uint32 // thread, in our pid namespace
	nr         int32
	arch       uint32
	ip         uint64
	args       [6]uint64
	_          [176]byte
}

type notifAnswer struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

// answer takes one question and answers it. It writes down first: who called may be
// gone afterwards.
func (l *listener) answer(fd uintptr) (failed bool) {
	var n notification
	if err := noEINTR(func() error { return ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)) }); err != nil {
		return err != unix.ENOENT // whoever asked is gone
	}
	v, err := confine.Judge(l.filter, n.arch, uint32(n.nr), n.args)
	if err != nil {
		l.sb.s.log.Error("a filter asks what it should not", "sandbox", l.sb.name(), "error", err)
	}
	now := time.Now().UTC()
	r := Refusal{Sandbox: l.sb.name(), Exec: l.exec, UID: -1, GID: -1, Call: int64(n.nr), Errno: v.Errno, Clause: v.Clause, Arg: v.Arg, Args: n.args,
		Count: 1, First: now, Last: now}
	who, err := procinfo.Who(int(n.pid))
	if err == nil && ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_ID_VALID, unsafe.Pointer(&n.id)) == nil { // it still waits: the number was its own
		r.who(&l.sb.spec, who)
	}
	tell := l.sb.s.refused.add(r)
	_ = ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&notifAnswer{id: n.id, err: -int32(v.Errno)})) // ENOENT: it was killed
	if tell {
		go l.sb.s.emit(wireEvent{Event: Event{Type: Refused}})
	}
	return false
}

func (r *Refusal) who(s *SpawnSpec, p procinfo.Info) {
	r.Exe, r.PID = strings.ToValidUTF8(p.Exe, "\uFFFD"), p.PID
	if len(r.Exe) > maxExe {
		r.Exe = strings.ToValidUTF8(r.Exe[:maxExe], "")
	}
	if p.UID-s.UIDBase < s.Count {
		r.UID = int64(p.UID - s.UIDBase)
	}
	if p.GID-s.GIDBase < s.Count {
		r.GID = int64(p.GID - s.GIDBase)
	}
}

func ioctl(fd, request uintptr, arg unsafe.Pointer) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

// Answers: so many a second, and so many at once, of a sandbox and of all. A program
// that does nothing but ask waits for its turn and costs no more than that.
const (
	paceSandbox = time.Second / 200
	paceAll     = time.Second / 2000
	paceAtOnce  = 256
)

// breathe waits until the next answer to the sandbox is due. Nobody has received the
// question by then, so that a signal or the freezer can still interrupt who asks.
func (s *server) breathe(sb *sandbox) {
	now := time.Now()
	wait := max(sb.pace.next(now, paceSandbox), s.pace.next(now, paceAll))
	if wait > 0 {
		time.Sleep(min(wait, longestPace))
	}
}

// pace is when the next of something may be.
type pace struct {
	mu sync.Mutex
	at time.Time
}

func (p *pace) next(now time.Time, every time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if first := now.Add(-paceAtOnce * every); p.at.Before(first) {
		p.at = first
	}
	if last := now.Add(longestPace); p.at.Before(last) {
		p.at = p.at.Add(every)
	}
	return p.at.Sub(now)
}
