package hold

import (
	"container/list"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// warmMost is how many sandboxes have the files open that every command of
// theirs needs; opening them takes a tenth of a command's start.
const warmMost = 256

// warmFiles are those files of one sandbox.
type warmFiles struct {
	tasks    []*os.File
	oom      *os.File // nil if there is none
	throttle *os.File

	users int
	stale bool // closed by the last user
	at    *list.Element
}

func (w *warmFiles) close() { closeAll(append(w.tasks, w.oom, w.throttle)) }

// warmth keeps the files of the sandboxes that were used last.
type warmth struct {
	mu     sync.Mutex
	recent list.List // of *sandbox, most recent first
}

// use gives the files of a sandbox, until done is called.
func (h *warmth) use(sb *sandbox) (*warmFiles, error) {
	h.mu.Lock()
	if w := sb.warm; w != nil {
		w.users++
		h.recent.MoveToFront(w.at)
		h.mu.Unlock()
		return w, nil
	}
	h.mu.Unlock()
	w, err := sb.openWarm()
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	w.users = 1
	if sb.warm != nil || sb.cold { // another was faster, or it is being removed
		w.stale = true
		return w, nil
	}
	sb.warm, w.at = w, h.recent.PushFront(sb)
	if h.recent.Len() > warmMost {
		h.coolLocked(h.recent.Back().Value.(*sandbox))
	}
	return w, nil
}

func (h *warmth) done(w *warmFiles) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w.users--; w.users == 0 && w.stale {
		w.close()
	}
}

// cool closes the files of a sandbox for good.
func (h *warmth) cool(sb *sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	sb.cold = true
	h.coolLocked(sb)
}

func (h *warmth) coolLocked(sb *sandbox) {
	w := sb.warm
	if w == nil {
		return
	}
	sb.warm, w.stale = nil, true
	h.recent.Remove(w.at)
	if w.users == 0 {
		w.close()
	}
}

func (sb *sandbox) openWarm() (*warmFiles, error) {
	tasks, err := openTasks(sb.spec.Tasks)
	if err != nil {
		return nil, err
	}
	w := &warmFiles{tasks: tasks}
	for path, into := range map[string]**os.File{sb.spec.Account.OOM: &w.oom, sb.spec.Account.Throttle: &w.throttle} {
		if path != "" {
			*into, _ = openPlain(path, unix.O_RDONLY) // what cannot be read counts as zero
		}
	}
	return w, nil
}
