package loader

import (
	"context"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
)

func idOf(f *os.File) (fileID, error) {
	dev, ino, err := precontent.ID(f)
	return fileID{dev, ino}, err
}

// events begins to answer a group. Several may be answered at one time: an agent
// whose hold has ended brings another one.
func (s *Server) events(f *frame) error {
	if len(f.files) != 2 {
		return dsec.Errorf(dsec.Invalid, "serve events", "", "%d descriptors", len(f.files))
	}
	group, journal := f.files[0], f.files[1]
	f.files = nil
	s.mu.Lock()
	s.groups++
	s.mu.Unlock()
	s.work.Go(func() {
		defer journal.Close()
		defer group.Close()
		err := precontent.Serve(s.ctx, group, journal, s.findFile, s.refused)
		s.mu.Lock()
		s.groups--
		s.mu.Unlock()
		if s.ctx.Err() == nil {
			s.opts.Log.Error("serve pre-content events", "err", err)
		}
	})
	return nil
}

func (s *Server) answering() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.groups > 0
}

// findFile is the layer of a file. One that is not known may be about to be handed
// over.
func (s *Server) findFile(dev, ino uint64) precontent.Source {
	s.mu.Lock()
	x := s.files[fileID{dev, ino}]
	s.mu.Unlock()
	if x != nil {
		return s.reader(x, "")
	}
	select {
	case <-s.ready:
	case <-s.ctx.Done():
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if dev == 0 && ino == 0 {
		var all precontent.All
		for _, x := range s.files {
			all = append(all, s.reader(x, ""))
		}
		return all
	}
	if x = s.files[fileID{dev, ino}]; x == nil {
		return nil
	}
	return s.reader(x, "")
}

// refused has it noted that a read by events is an error of which no layer knows:
// of that of the file, or, if nobody knows that, of all that are read so.
func (s *Server) refused(ctx context.Context, dev, ino uint64, err error) {
	select {
	case <-s.ready: // until then the layers are not known
	case <-ctx.Done():
		return
	}
	var all sync.WaitGroup
	for _, x := range s.suspects(dev, ino) {
		all.Go(func() {
			s.failed(ctx, x, "", dsec.E(dsec.Internal, "read layer", string(x.digest), err))
		})
	}
	all.Wait()
}

// suspects are the layers of which a file may be.
func (s *Server) suspects(dev, ino uint64) (out []*served) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.files[fileID{dev, ino}]; x != nil {
		return []*served{x}
	}
	for _, x := range s.layers {
		if slices.Contains(slices.Collect(maps.Values(x.sessions)), true) {
			out = append(out, x)
		}
	}
	return out
}
