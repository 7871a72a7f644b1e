package nodeapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/files"
)

const (
	// stall is how long a transfer may stand still before it is given up.
	stall      = 2 * time.Minute
	copyBuffer = 64 << 10
	maxRequest = 1 << 20 // of a message that opens a stream
)

// mux is the data connection.
func (s *Server) mux() http.Handler {
	m := http.NewServeMux()
	m.HandleFunc("POST "+wire.PathCall+"{verb}", s.serveCall)
	m.HandleFunc("POST "+wire.PathSession, s.serveSession)
	m.HandleFunc("POST "+wire.PathOutput, s.serveOutput)
	m.HandleFunc("POST "+wire.PathWatch, s.serveWatch)
	m.HandleFunc("POST "+wire.PathAudit, s.serveAudit)
	m.HandleFunc("POST "+wire.PathImport, s.serveImport)
	m.HandleFunc("POST "+wire.PathBuild, s.serveBuild)
	m.HandleFunc("POST "+wire.PathRepack, s.serveRepack)
	m.HandleFunc("POST "+wire.PathUpload, s.serveUpload)
	m.HandleFunc("POST "+wire.PathEnsure, s.serveEnsure)
	m.HandleFunc("GET "+wire.PathExport, s.raw(s.exportImage))
	if s.cfg.Metrics != nil {
		m.Handle("GET "+wire.PathMetrics, s.cfg.Metrics)
	}
	m.HandleFunc("GET "+wire.PathSandbox+"{id}/files", s.raw(s.readFile))
	m.HandleFunc("PUT "+wire.PathSandbox+"{id}/files", s.raw(s.writeFile))
	m.HandleFunc("GET "+wire.PathSandbox+"{id}/tree", s.raw(s.download))
	m.HandleFunc("PUT "+wire.PathSandbox+"{id}/tree", s.raw(s.upload))
	m.HandleFunc("PUT "+wire.PathSandbox+"{id}/stdin/{exec}", s.raw(s.feedStdin))
	m.HandleFunc("GET "+wire.PathSandbox+"{id}/tunnel/{port}", s.raw(s.tunnel))
	return m
}

// raw runs a handler that returns its error while nothing was answered yet.
func (s *Server) raw(fn func(w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := fn(w, r); err != nil {
			wire.WriteError(w, s.closing(err))
		}
	}
}

func who(r *http.Request) caller { return caller{r.Header.Get(wire.HeaderProject)} }

func (s *Server) readFile(w http.ResponseWriter, r *http.Request) error {
	q := parameters(r)
	offset, length := q.offset("offset", 0, 0), q.offset("length", -1, -1)
	if q.err != nil {
		return q.err
	}
	id, fs, err := s.fs(r.Context(), who(r), r.PathValue("id"), q.v.Get("user"))
	if err != nil {
		return err
	}
	defer s.cfg.Inside.Attach(id)()
	f := newFramed(w)
	buf := bufio.NewWriterSize(f, copyBuffer)
	_, err = fs.Read(r.Context(), q.v.Get("path"), offset, length, buf)
	if err == nil {
		err = buf.Flush()
	}
	return f.end(s.closing(s.ended(id, err)))
}

func (s *Server) writeFile(w http.ResponseWriter, r *http.Request) error {
	q := parameters(r)
	o := files.WriteOptions{Mode: q.mode("mode"), UID: q.id("uid"), GID: q.id("gid"),
		Parents: q.flag("parents"), Append: q.flag("append"), SHA256: q.v.Get("sha256")}
	if q.err != nil {
		return q.err
	}
	id, fs, err := s.fs(r.Context(), who(r), r.PathValue("id"), q.v.Get("user"))
	if err != nil {
		return err
	}
	defer s.cfg.Inside.Attach(id)()
	info, err := fs.Write(r.Context(), q.v.Get("path"), newMovingBody(w, r), o)
	if err != nil {
		return s.ended(id, bodyError("write file", q.v.Get("path"), err))
	}
	b, err := wire.JSON{}.Marshal(wire.FileInfo(info))
	if err != nil {
		return dsec.E(dsec.Internal, "write file", q.v.Get("path"), err)
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b) // the gateway sees a short body
	return nil
}

func (s *Server) download(w http.ResponseWriter, r *http.Request) error {
	q := parameters(r)
	o := files.TreeOptions{Globs: q.v["glob"], Max: q.offset("max", 0, 0)}
	if q.err != nil {
		return q.err
	}
	id, fs, err := s.fs(r.Context(), who(r), r.PathValue("id"), q.v.Get("user"))
	if err != nil {
		return err
	}
	defer s.cfg.Inside.Attach(id)()
	f := newFramed(w)
	buf := bufio.NewWriterSize(f, copyBuffer)
	err = fs.Download(r.Context(), q.v.Get("path"), buf, o)
	if err == nil {
		err = buf.Flush()
	}
	return f.end(s.closing(s.ended(id, err)))
}

func (s *Server) upload(w http.ResponseWriter, r *http.Request) error {
	q := parameters(r)
	o := files.TreeOptions{UID: q.id("uid"), GID: q.id("gid")}
	if q.err != nil {
		return q.err
	}
	id, fs, err := s.fs(r.Context(), who(r), r.PathValue("id"), q.v.Get("user"))
	if err != nil {
		return err
	}
	defer s.cfg.Inside.Attach(id)()
	body := newMovingBody(w, r)
	if err := fs.Upload(r.Context(), q.v.Get("path"), body, o); err != nil {
		return s.ended(id, bodyError("upload tree", q.v.Get("path"), err))
	}
	if _, err := io.Copy(io.Discard, body); err != nil { // padding after the end of the tar
		return dsec.E(dsec.Canceled, "upload tree", q.v.Get("path"), err)
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, "{}")
	return nil
}

// feedStdin streams the body into an exec.
func (s *Server) feedStdin(w http.ResponseWriter, r *http.Request) error {
	ctx, q := r.Context(), parameters(r)
	var offset *int64
	if q.v.Get("offset") != "" {
		n := q.offset("offset", 0, 0)
		offset = &n
	}
	if q.err != nil {
		return q.err
	}
	id, p, err := s.process(ctx, who(r), r.PathValue("id"), r.PathValue("exec"))
	if err != nil {
		return err
	}
	defer s.cfg.Inside.Attach(id)()
	in := s.stdins.get(id, r.PathValue("exec"))
	skip, err := in.take(ctx, r.PathValue("exec"), offset)
	if err != nil {
		return err
	}
	defer func() { <-in.turn }()
	_, err = io.CopyN(io.Discard, r.Body, skip)
	if err == nil {
		_, err = io.CopyBuffer(&stdinWriter{ctx, p, in}, r.Body, make([]byte, copyBuffer))
	}
	if errors.Is(err, io.EOF) {
		err = nil // shorter than what is written already
	}
	if err == nil && q.flag("close") {
		err = p.CloseStdin(ctx)
	}
	if err != nil {
		return s.ended(id, bodyError("write stdin", r.PathValue("exec"), err))
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(map[string]string{"offset": strconv.FormatInt(in.written, 10)})
}

// stdinWriter is the stdin of an exec.
type stdinWriter struct {
	ctx context.Context //nolint:containedctx // lives for one copy
	p   interface {
		Write(ctx context.Context, p []byte) (int, error)
	}
	in *stdin
}

func (w *stdinWriter) Write(p []byte) (int, error) {
	n, err := w.p.Write(w.ctx, p)
	w.in.written += int64(n)
	return n, err
}

// tunnel splices the connection with one to a port of the sandbox.
func (s *Server) tunnel(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || port == 0 {
		return dsec.Errorf(dsec.Invalid, "dial port", r.PathValue("port"), "want 1 to 65535")
	}
	id, err := s.own(r.Context(), who(r), r.PathValue("id"))
	if err != nil {
		return err
	}
	release, err := s.conns.take(id, s.cfg.PortConns)
	if err != nil {
		return err
	}
	defer release()
	in, err := s.cfg.Inside.Dial(r.Context(), id, uint16(port))
	if err != nil {
		return s.ended(id, err)
	}
	defer s.cfg.Inside.Attach(id)()
	out, err := wire.Accept(w)
	if err != nil {
		_ = in.Close()
		return nil
	}
	stop := context.AfterFunc(s.ctx, func() {
		_ = in.Close()
		_ = out.Close()
	})
	defer stop()
	if s.crew.Join() { // Shutdown does not wait for a hijacked connection
		defer s.crew.Leave()
	}
	wire.Splice(out, in)
	return nil
}

// pushed is what an import or build answers.
func pushed(p Progress) *dsecv1.ImportResponse {
	return &dsecv1.ImportResponse{Phase: p.Phase, Done: p.Done, Total: p.Total}
}
