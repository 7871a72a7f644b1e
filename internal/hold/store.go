package hold

import (
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

const maxName = 256

// storeOp keeps descriptors under names.
func (s *server) storeOp(f *frame) (any, []*os.File, error) {
	r, err := read[wireName](f)
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch f.op {
	case opPut:
		if r.Name == "" || len(r.Name) > maxName {
			return nil, nil, dsec.Errorf(dsec.Invalid, "keep descriptor", dsec.Quote(r.Name), "name of %d bytes, want 1 to %d", len(r.Name), maxName)
		}
		file, err := f.take(0)
		if err != nil {
			return nil, nil, err
		}
		f.files[0] = nil
		if old := s.store[r.Name]; old != nil {
			_ = old.Close()
		}
		s.store[r.Name] = file
		return nil, nil, nil
	case opGet:
		file := s.store[r.Name]
		if file == nil {
			return nil, nil, dsec.E(dsec.NotFound, "get descriptor", r.Name, nil)
		}
		d, err := duplicate(file)
		return nil, []*os.File{d}, err
	case opDrop:
		if old := s.store[r.Name]; old != nil {
			_ = old.Close()
			delete(s.store, r.Name)
		}
		return nil, nil, nil
	}
	names := []string{}
	for n := range s.store {
		if strings.HasPrefix(n, r.Name) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return wireNames{Names: names}, nil, nil
}

func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(fdOf(f)), unix.F_DUPFD_CLOEXEC, 5)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "duplicate descriptor", "", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
