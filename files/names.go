package files

import (
	"bytes"
	"io"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxNamesFile = 1 << 20
	namesFresh   = time.Second // how old a parsed file may be
	maxName      = 255
)

// names maps ids to names as the root's own /etc/passwd and /etc/group say;
// the files are the sandbox's and prove nothing.
type names struct {
	mu     sync.Mutex
	read   time.Time
	users  map[uint32]string
	groups map[uint32]string
}

func (n *names) lookup(l *Local, uid, gid uint32) (user, group string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.users == nil || time.Since(n.read) > namesFresh {
		n.users, n.groups = l.parseNames("/etc/passwd"), l.parseNames("/etc/group")
		n.read = time.Now()
	}
	return nameOr(n.users, uid), nameOr(n.groups, gid)
}

func nameOr(m map[uint32]string, id uint32) string {
	if s, ok := m[id]; ok {
		return s
	}
	return strconv.FormatUint(uint64(id), 10)
}

// parseNames reads name:x:id lines; the first of an id wins. Without the file
// there are no names.
func (l *Local) parseNames(path string) map[uint32]string {
	m := map[uint32]string{}
	f, _, err := l.openRegular(opRead, path, unix.O_RDONLY)
	if err != nil {
		return m
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxNamesFile))
	if err != nil {
		return m
	}
	for line := range bytes.Lines(text) {
		fields := bytes.SplitN(line, []byte(":"), 4)
		if len(fields) < 4 || len(fields[0]) == 0 || len(fields[0]) > maxName {
			continue
		}
		id, err := strconv.ParseUint(string(fields[2]), 10, 32)
		if _, taken := m[uint32(id)]; err == nil && !taken {
			m[uint32(id)] = string(fields[0])
		}
	}
	return m
}
