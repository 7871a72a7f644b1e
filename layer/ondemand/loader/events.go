package loader

import (
	"os"

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
		err := precontent.Serve(s.ctx, group, journal, s.findFile)
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
		return reader{data: x.data, s: s, x: x}
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
			all = append(all, reader{data: x.data, s: s, x: x})
		}
		return all
	}
	if x = s.files[fileID{dev, ino}]; x == nil {
		return nil
	}
	return reader{data: x.data, s: s, x: x}
}
