// Package reads records what is read of the data files of mounted layers, as a
// loader of data on demand would be asked for it: each read of the file system
// that misses its page cache, in order. It needs Linux 6.14 (pre-content
// events), ext4, XFS or btrfs under the files, and root.
package reads

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Read is one read of a file.
type Read struct {
	File string // as it was given to Watch
	Off  int64
	Len  int64
}

// Recorder watches files until Close.
type Recorder struct {
	group *os.File
	names map[uint64]string // by inode; all files are on one file system
	done  chan struct{}

	mu    sync.Mutex
	reads []Read
	err   error
}

// Watch records reads of files. It must be called before the files are opened
// by whom shall be recorded: the kernel decides at open whether it asks.
func Watch(paths ...string) (*Recorder, error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_PRE_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_UNLIMITED_QUEUE|unix.FAN_UNLIMITED_MARKS,
		unix.O_RDONLY|unix.O_LARGEFILE|unix.O_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch reads: %w", err)
	}
	r := &Recorder{group: os.NewFile(uintptr(fd), "fanotify"), names: map[uint64]string{}, done: make(chan struct{})}
	for _, p := range paths {
		var st unix.Stat_t
		err := unix.Stat(p, &st)
		if err == nil {
			err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_PRE_ACCESS, unix.AT_FDCWD, p)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("watch reads of %s: %w", p, err), r.group.Close())
		}
		r.names[st.Ino] = p
	}
	go r.loop()
	return r, nil
}

// Take returns what was read since the last Take.
func (r *Recorder) Take() ([]Read, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.reads
	r.reads = nil
	return out, r.err
}

// Close ends the watch; who waits for an answer is let go.
func (r *Recorder) Close() error {
	err := r.group.Close()
	<-r.done
	return err
}

// The kernel's fanotify_event_metadata and its range record.
const (
	eventHeader = 24
	rangeRecord = 24
)

func (r *Recorder) loop() {
	defer close(r.done)
	b := make([]byte, 64<<10)
	for {
		n, err := r.group.Read(b)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				r.note(Read{}, err)
			}
			return
		}
		for at := b[:n]; len(at) >= eventHeader; {
			size := binary.NativeEndian.Uint32(at)
			if size < eventHeader || int(size) > len(at) {
				r.note(Read{}, fmt.Errorf("an event of %d bytes in %d", size, len(at)))
				return
			}
			r.event(at[:size])
			at = at[size:]
		}
	}
}

// event notes a read and lets it go on: the data is whole.
func (r *Recorder) event(b []byte) {
	fd := int32(binary.NativeEndian.Uint32(b[16:]))
	if fd < 0 {
		return
	}
	defer unix.Close(int(fd))
	var st unix.Stat_t
	err := unix.Fstat(int(fd), &st)
	for info := b[eventHeader:]; len(info) >= 4; {
		size := int(binary.NativeEndian.Uint16(info[2:]))
		if size < 4 || size > len(info) {
			break
		}
		if info[0] == unix.FAN_EVENT_INFO_TYPE_RANGE && size >= rangeRecord {
			r.note(Read{r.names[st.Ino], int64(binary.NativeEndian.Uint64(info[8:])), int64(binary.NativeEndian.Uint64(info[16:]))}, err)
		}
		info = info[size:]
	}
	answer := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, uint32(fd)), unix.FAN_ALLOW)
	if _, err := r.group.Write(answer); err != nil && !errors.Is(err, os.ErrClosed) {
		r.note(Read{}, err)
	}
}

func (r *Recorder) note(read Read, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.err = errors.Join(r.err, err)
	} else {
		r.reads = append(r.reads, read)
	}
}
