package precontent

import (
	"encoding/binary"
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/layer/ondemand/journal"
)

// A slot of the journal: one event as the kernel wrote it, and behind it which
// file it is of, which the number of a descriptor of a process that has ended
// does not say.
const (
	headerSize = 24              // struct fanotify_event_metadata
	rangeSize  = 24              // struct fanotify_event_info_range
	eventRoom  = headerSize + 40 // one event fits, two do not
	inoAt      = 96
	devAt      = 104
)

var shape = journal.Shape{Slots: 1024, Size: 128}

var le = binary.LittleEndian

// event is what somebody waits for.
type event struct {
	fd       int32 // its name; a descriptor of the process that read it
	pid      int32
	off, n   int64
	dev, ino uint64 // 0: not noted
}

// parse reads a slot. All events that are asked for have a range; also one that
// cannot be read has a name, by which it is to be denied.
func parse(b []byte) (event, error) {
	e := event{fd: int32(le.Uint32(b[16:])), pid: int32(le.Uint32(b[20:])), ino: le.Uint64(b[inoAt:])}
	e.dev = atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[devAt])))
	size := int(le.Uint32(b))
	if size < headerSize || size > eventRoom || b[4] != unix.FANOTIFY_METADATA_VERSION {
		return e, fmt.Errorf("event of %d bytes, version %d", size, b[4])
	}
	for at := int(le.Uint16(b[6:])); at+4 <= size; {
		n := int(le.Uint16(b[at+2:]))
		if n < 4 || at+n > size {
			break
		}
		if b[at] == unix.FAN_EVENT_INFO_TYPE_RANGE && n >= rangeSize {
			off, n := le.Uint64(b[at+8:]), le.Uint64(b[at+16:])
			if off > math.MaxInt64 {
				return e, fmt.Errorf("event at %d", off)
			}
			e.off, e.n = int64(off), int64(min(n, math.MaxInt64-off))
			return e, nil
		}
		at += n
	}
	return e, fmt.Errorf("event of %d bytes without a range", size)
}

// note writes down which file an event is of; the device last, as the sign.
func note(b []byte, dev, ino uint64) {
	le.PutUint64(b[inoAt:], ino)
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&b[devAt])), dev)
}

// What an event is answered with.
const (
	allow = unix.FAN_ALLOW
	deny  = unix.FAN_DENY | uint32(unix.EIO)<<24
)

func answer(fd int32, response uint32) []byte {
	return le.AppendUint32(le.AppendUint32(nil, uint32(fd)), response)
}
