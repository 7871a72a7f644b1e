package hold

import (
	"context"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

const maxName = 256

// storeOp keeps descriptors under names. What it lets go of is closed when others
// may go on, be it the next client: the end of a mount waits for reads that are
// being made, and they for a loader that is to be given what is kept here.
func (s *server) storeOp(ctx context.Context, f *frame) (any, []*os.File, error) {
	body, files, old, err := s.stored(f)
	if old != nil {
		closed := make(chan struct{})
		go func() {
			_ = old.Close() // forgotten
			close(closed)
		}()
		select {
		case <-closed:
		case <-ctx.Done():
		}
	}
	return body, files, err
}

func (s *server) stored(f *frame) (body any, files []*os.File, old *os.File, err error) {
	r, err := read[wireName](f)
	if err != nil {
		return nil, nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch f.op {
	case opPut:
		if r.Name == "" || len(r.Name) > maxName {
			return nil, nil, nil, dsec.Errorf(dsec.Invalid, "keep descriptor", dsec.Quote(r.Name), "name of %d bytes, want 1 to %d", len(r.Name), maxName)
		}
		file, err := f.take(0)
		if err != nil {
			return nil, nil, nil, err
		}
		f.files[0] = nil
		old = s.store[r.Name]
		s.store[r.Name] = file
		return nil, nil, old, nil
	case opGet:
		file := s.store[r.Name]
		if file == nil {
			return nil, nil, nil, dsec.E(dsec.NotFound, "get descriptor", r.Name, nil)
		}
		d, err := duplicate(file)
		return nil, []*os.File{d}, nil, err
	case opDrop:
		old = s.store[r.Name]
		delete(s.store, r.Name)
		return nil, nil, old, nil
	}
	names := []string{}
	for n := range s.store {
		if strings.HasPrefix(n, r.Name) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return wireNames{Names: names}, nil, nil, nil
}

func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(fdOf(f)), unix.F_DUPFD_CLOEXEC, 5)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "duplicate descriptor", "", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
