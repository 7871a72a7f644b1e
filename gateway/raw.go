package gateway

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

const (
	copyBuffer = 64 << 10
	maxAnswer  = 1 << 20 // of a raw request that answers with JSON
	nodeStall  = 3 * time.Minute
)

func (g *Gateway) readFile(w http.ResponseWriter, r *http.Request) error {
	return g.get(w, r, "/files")
}

func (g *Gateway) downloadTree(w http.ResponseWriter, r *http.Request) error {
	return g.get(w, r, "/tree")
}

func (g *Gateway) writeFile(w http.ResponseWriter, r *http.Request) error {
	return g.put(w, r, "/files", newMovingBody(w, r))
}

func (g *Gateway) uploadTree(w http.ResponseWriter, r *http.Request) error {
	return g.put(w, r, "/tree", newMovingBody(w, r))
}

func (g *Gateway) feedStdin(w http.ResponseWriter, r *http.Request) error {
	if !wire.ExecID(r.PathValue("exec")) {
		return dsec.Errorf(dsec.Invalid, "find exec", dsec.Quote(r.PathValue("exec")), "not the id of an exec")
	}
	// The client may be a person who thinks, the command may not read.
	return g.put(w, r, "/stdin/"+r.PathValue("exec"), &movingBody{Reader: r.Body})
}

// target is the node and path of a raw request.
func target(r *http.Request, what string) (dsec.NodeID, string, error) {
	id, node, err := dsec.ParseSandboxID(r.PathValue("id"))
	if err == nil {
		err = wire.CheckQuery(r.URL.Query())
	}
	if err != nil {
		return "", "", err
	}
	return node, wire.PathSandbox + string(id) + what + "?" + r.URL.RawQuery, nil
}

// get passes bytes of a node on: as frames if asked for, else plain, and then
// a transfer that fails is broken off, never ended.
func (g *Gateway) get(w http.ResponseWriter, r *http.Request, what string) error {
	node, path, err := target(r, what)
	if err != nil {
		return err
	}
	return g.pass(w, r, node, path)
}

// pass is get of a path of a node.
func (g *Gateway) pass(w http.ResponseWriter, r *http.Request, node dsec.NodeID, path string) error {
	resp, err := g.cfg.Cluster.Do(r.Context(), node, wire.Request{Method: http.MethodGet, Path: path, Project: scope(r.Context())})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	out := io.Writer(w)
	var frames *wire.FrameWriter
	if b := r.URL.Query().Get("framed"); b == "1" || b == "true" {
		frames = wire.NewFrameWriter(w)
		out = frames
	}
	src := &watched{Reader: wire.NewFrameReader("read from node", resp.Body), dog: newWatchdog(resp.Body, nodeStall)}
	defer src.dog.stop()
	_, err = io.CopyBuffer(onlyWriter{out}, src, make([]byte, copyBuffer))
	switch {
	case frames != nil:
		_ = frames.End(err) // the client went away, or sees the error
	case err != nil && w.(*recorder).status == 0:
		return err
	case err != nil:
		panic(http.ErrAbortHandler)
	}
	return nil
}

// onlyWriter keeps io.Copy to the buffer it was given.
type onlyWriter struct{ io.Writer }

// watched is a body whose sender must not stand still while we read.
type watched struct {
	io.Reader
	dog *watchdog
}

func (s *watched) Read(p []byte) (int, error) {
	s.dog.fed()
	n, err := s.Reader.Read(p)
	s.dog.stop()
	return n, err
}

// put passes a body on to a node and answers what it answers.
func (g *Gateway) put(w http.ResponseWriter, r *http.Request, what string, body *movingBody) error {
	node, path, err := target(r, what)
	if err != nil {
		return err
	}
	resp, err := g.cfg.Cluster.Do(r.Context(), node, wire.Request{Method: http.MethodPut, Path: path,
		Project: scope(r.Context()), Body: body, Length: r.ContentLength})
	if err != nil {
		return body.blame(err, r.URL.Path)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return dsec.E(dsec.Unavailable, "read from node", string(node), err)
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b) // the client went away
	return nil
}

// movingBody is what a client uploads: it may be slow, but not stand still.
type movingBody struct {
	io.Reader
	rc  *http.ResponseController // nil: it may stand still
	err error                    // what reading ended with
}

func newMovingBody(w http.ResponseWriter, r *http.Request) *movingBody {
	return &movingBody{Reader: r.Body, rc: http.NewResponseController(w)}
}

func (b *movingBody) Read(p []byte) (int, error) {
	if b.rc != nil {
		_ = b.rc.SetReadDeadline(time.Now().Add(stall)) // HTTP/2 and HTTP/1 both can
	}
	n, err := b.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

// blame says Canceled or Timeout where the body broke, not the node.
func (b *movingBody) blame(err error, path string) error {
	if b.err == nil || dsec.ClassOf(err) != dsec.Unavailable {
		return err
	}
	class := dsec.Canceled
	if t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](b.err); ok && t.Timeout() {
		class = dsec.Timeout
	}
	return dsec.E(class, "read request", path, b.err)
}

// uploadLayer makes a layer of a tar in the body and answers with it.
func (g *Gateway) uploadLayer(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	if k := q.Get("kind"); k != "" && k != "build" && k != "import" {
		return dsec.Errorf(dsec.Invalid, "upload layer", "kind", "%s, want build or import", dsec.Quote(k))
	}
	if err := wire.CheckQuery(q); err != nil {
		return err
	}
	node, err := g.layerNode()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), commitWithin)
	defer cancel()
	pass := url.Values{}
	for _, name := range []string{"kind", "tag", "at", "owner", "call_id"} {
		pass.Set(name, q.Get(name))
	}
	pass.Set("source", "upload by "+principal(ctx).Name)
	body := newMovingBody(w, r)
	resp, err := g.cfg.Cluster.Do(ctx, node, wire.Request{Method: http.MethodPost, Path: wire.PathUpload + "?" + pass.Encode(),
		Project: scope(ctx), Body: body, Length: r.ContentLength})
	if err != nil {
		return body.blame(err, r.URL.Path)
	}
	defer resp.Body.Close()
	last := &dsecv1.ImportResponse{}
	err = relay(wire.NewFrameReader("read from node", resp.Body), resp.Body,
		func() *dsecv1.ImportResponse { return &dsecv1.ImportResponse{} },
		func(m *dsecv1.ImportResponse) error { last = m; return nil }, last)
	if err == nil && last.Layer == nil {
		err = dsec.Errorf(dsec.Unavailable, "upload layer", q.Get("tag"), "the node named no layer")
	}
	if err != nil {
		return body.blame(err, r.URL.Path)
	}
	return writeJSON(w, last)
}

func writeJSON(w http.ResponseWriter, m proto.Message) error {
	b, err := wire.JSON{}.Marshal(m)
	if err != nil {
		return dsec.E(dsec.Internal, "encode answer", "", err)
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b) // the client went away
	return nil
}
