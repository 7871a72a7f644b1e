package nodeapi

import (
	"context"
	"io"
	"net/http"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/files"
)

// aliveEvery is how often a stream with nothing to say says so.
const aliveEvery = 10 * time.Second

// push runs fn, which sends messages until it returns, and answers with them
// as frames; in between there are signs of life. It is the only writer.
func (s *Server) push(w http.ResponseWriter, r *http.Request, fn func(ctx context.Context, send func(proto.Message) error) error) error {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	out := make(chan proto.Message)
	var err error // of fn; read after out is closed
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(out)
		err = fn(ctx, func(m proto.Message) error {
			select {
			case out <- m:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	})
	f := newFramed(w)
	werr := pump(f, out)
	cancel(werr)
	for range out { // fn ends at its next send
	}
	wg.Wait()
	if werr != nil {
		return nil // the reader went away
	}
	return f.end(s.closing(err))
}

// pump writes messages as they come and flushes when there is no next one yet.
func pump(f *framed, out <-chan proto.Message) error {
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		var m proto.Message
		var ok bool
		select {
		case m, ok = <-out:
		default:
			if f.begun {
				if err := f.rc.Flush(); err != nil {
					return err
				}
			}
			select {
			case m, ok = <-out:
			case <-tick.C:
				if err := f.alive(); err != nil {
					return err
				}
				continue
			}
		}
		if !ok {
			return nil
		}
		if err := f.message(m); err != nil {
			return err
		}
	}
}

func (s *Server) serveWatch(w http.ResponseWriter, r *http.Request) {
	req := &dsecv1.WatchRequest{}
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		if err := request(w, r, req); err != nil {
			return err
		}
		id, fs, err := s.fs(r.Context(), who(r), req.Sandbox, req.User)
		if err != nil {
			return err
		}
		watcher, ok := fs.(files.Watcher)
		if !ok {
			return dsec.Errorf(dsec.Unsupported, "watch", req.Path, "this tier cannot watch files")
		}
		defer s.cfg.Inside.Attach(id)()
		return s.push(w, r, func(ctx context.Context, send func(proto.Message) error) error {
			err := watcher.Watch(ctx, req.Path, req.Recursive, func(c files.Change) error {
				return send(&dsecv1.WatchResponse{Path: c.Path, Op: string(c.Op)})
			})
			return s.ended(id, err)
		})
	})(w, r)
}

func (s *Server) serveImport(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		req := &dsecv1.ImportRequest{}
		if err := request(w, r, req); err != nil {
			return err
		}
		in := Import{Source: req.Source, Tag: req.Tag, Arch: req.Arch, CallID: req.CallId}
		return s.makeLayer(w, r, req.Tag, func(ctx context.Context, store Layers, progress func(Progress)) (Layer, error) {
			return store.Import(ctx, in, progress)
		})
	})(w, r)
}

func (s *Server) serveBuild(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		req := &dsecv1.BuildRequest{}
		if err := request(w, r, req); err != nil {
			return err
		}
		b := Build{Source: req.Source, Tag: req.Tag, At: req.At, Owner: req.Owner, CallID: req.CallId}
		return s.makeLayer(w, r, req.Tag, func(ctx context.Context, store Layers, progress func(Progress)) (Layer, error) {
			return store.Build(ctx, b, progress)
		})
	})(w, r)
}

func (s *Server) serveRepack(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		req := &dsecv1.RepackRequest{}
		if err := request(w, r, req); err != nil {
			return err
		}
		p := Repack{Ref: dsec.LayerRef(req.Ref), Tag: req.Tag, CallID: req.CallId}
		return s.makeLayer(w, r, req.Tag, func(ctx context.Context, store Layers, progress func(Progress)) (Layer, error) {
			return store.Repack(ctx, p, progress)
		})
	})(w, r)
}

// maxRefused bounds what is read of an upload that has failed.
const maxRefused = 256 << 20

// serveUpload makes a layer of a tar in the body.
func (s *Server) serveUpload(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		q := r.URL.Query()
		if err := wire.CheckQuery(q); err != nil {
			return err
		}
		body := newMovingBody(w, r)
		// The answer begins while the body is still read.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			return dsec.E(dsec.Internal, "upload layer", "", err)
		}
		// A body that was refused is read on: net/http panics over one that is left
		// in the middle when reading and answering overlap.
		defer func() { _, _ = io.CopyN(io.Discard, body, maxRefused) }()
		return s.makeLayer(w, r, q.Get("tag"), func(ctx context.Context, store Layers, progress func(Progress)) (Layer, error) {
			if q.Get("kind") == "import" {
				return store.Import(ctx, Import{Source: q.Get("source"), Tar: body, Tag: q.Get("tag"), CallID: q.Get("call_id")}, progress)
			}
			return store.Build(ctx, Build{Source: q.Get("source"), Tar: body, Tag: q.Get("tag"), At: q.Get("at"),
				Owner: q.Get("owner"), CallID: q.Get("call_id")}, progress)
		})
	})(w, r)
}

// makeLayer answers with progress and, last, the layer. A tag that the caller
// may not move is refused before anything is read.
func (s *Server) makeLayer(w http.ResponseWriter, r *http.Request, tag string, fn func(ctx context.Context, store Layers, progress func(Progress)) (Layer, error)) error {
	store, err := s.store(who(r))
	if err == nil && tag != "" {
		err = store.MayTag(r.Context(), dsec.LayerRef(tag))
	}
	if err != nil {
		return err
	}
	return s.push(w, r, func(ctx context.Context, send func(proto.Message) error) error {
		l, err := fn(ctx, store, func(p Progress) {
			_ = send(pushed(p)) // a caller that left is seen through ctx
		})
		if err != nil {
			return err
		}
		return send(&dsecv1.ImportResponse{Phase: "store", Layer: wire.Layer(l.Info, l.Tags)})
	})
}
