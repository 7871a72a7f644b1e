package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/files"
)

// Files is the file service of a sandbox as one user ("" is the default one).
// It implements files.FS and files.Watcher.
func (c *Client) Files(id dsec.SandboxID, user string) *Files {
	return &Files{c: c, id: string(id), user: user}
}

// Files reaches into one sandbox.
type Files struct {
	c    *Client
	id   string
	user string
}

var (
	_ files.FS      = (*Files)(nil)
	_ files.Watcher = (*Files)(nil)
)

// Stat implements files.FS.
func (f *Files) Stat(ctx context.Context, path string, follow bool) (files.Info, error) {
	var resp *dsecv1.StatResponse
	err := f.c.retry(ctx, "stat "+path, func() (err error) {
		resp, err = f.c.files.Stat(ctx, &dsecv1.StatRequest{Sandbox: f.id, User: f.user, Path: path, Follow: follow})
		return err
	})
	return wire.FileInfoFrom(resp.GetInfo()), err
}

// List implements files.FS.
func (f *Files) List(ctx context.Context, path string, depth int) ([]files.Info, error) {
	var resp *dsecv1.ListFilesResponse
	err := f.c.retry(ctx, "list "+path, func() (err error) {
		resp, err = f.c.files.List(ctx, &dsecv1.ListFilesRequest{Sandbox: f.id, User: f.user, Path: path, Depth: int32(depth)})
		return err
	})
	var out []files.Info
	for _, e := range resp.GetEntries() {
		out = append(out, wire.FileInfoFrom(e))
	}
	return out, err
}

// Mkdir implements files.FS.
func (f *Files) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	req := &dsecv1.MkdirRequest{Sandbox: f.id, User: f.user, Path: path, Mode: mode, Parents: parents, CallId: newKey()}
	return f.c.retry(ctx, "mkdir "+path, func() error {
		_, err := f.c.files.Mkdir(ctx, req)
		return err
	})
}

// Move implements files.FS.
func (f *Files) Move(ctx context.Context, from, to string) error {
	req := &dsecv1.MoveRequest{Sandbox: f.id, User: f.user, From: from, To: to, CallId: newKey()}
	return f.c.retry(ctx, "move "+from, func() error {
		_, err := f.c.files.Move(ctx, req)
		return err
	})
}

// Remove implements files.FS.
func (f *Files) Remove(ctx context.Context, path string, recursive bool) error {
	req := &dsecv1.RemoveFileRequest{Sandbox: f.id, User: f.user, Path: path, Recursive: recursive, CallId: newKey()}
	return f.c.retry(ctx, "remove "+path, func() error {
		_, err := f.c.files.Remove(ctx, req)
		return err
	})
}

// SetAttr implements files.FS.
func (f *Files) SetAttr(ctx context.Context, path string, a files.Attr) error {
	req := &dsecv1.SetAttrRequest{Sandbox: f.id, User: f.user, Path: path, Mode: a.Mode, Uid: a.UID, Gid: a.GID, CallId: newKey()}
	if a.MTime != nil {
		req.Mtime = wire.Stamp(*a.MTime)
	}
	return f.c.retry(ctx, "set attributes of "+path, func() error {
		_, err := f.c.files.SetAttr(ctx, req)
		return err
	})
}

// Watch implements files.Watcher.
func (f *Files) Watch(ctx context.Context, dir string, recursive bool, fn func(files.Change) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.c.files.Watch(ctx, &dsecv1.WatchRequest{Sandbox: f.id, User: f.user, Path: dir, Recursive: recursive})
	if err != nil {
		return wire.FromConnect("watch "+dir, err)
	}
	defer stream.Close()
	for stream.Receive() {
		if m := stream.Msg(); m.Op != "" {
			if err := fn(files.Change{Path: m.Path, Op: files.Op(m.Op)}); err != nil {
				return err
			}
		}
	}
	return wire.FromConnect("watch "+dir, stream.Err())
}

func sandboxPath(id dsec.SandboxID) string { return "/v1/sandboxes/" + string(id) }

func (f *Files) path(what, path string, q url.Values) string {
	q.Set("path", path)
	if f.user != "" {
		q.Set("user", f.user)
	}
	return sandboxPath(dsec.SandboxID(f.id)) + what + "?" + q.Encode()
}

// Read implements files.FS.
func (f *Files) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	q := url.Values{"framed": {"1"}, "offset": {strconv.FormatInt(offset, 10)}, "length": {strconv.FormatInt(length, 10)}}
	return f.get(ctx, "read "+path, f.path("/files", path, q), w)
}

func (f *Files) get(ctx context.Context, op, path string, w io.Writer) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := f.c.newSilence(cancel)
	defer quiet.stop()
	resp, err := f.c.raw(ctx, http.MethodGet, path, nil)
	if err != nil {
		return 0, quiet.blame(op, "", err)
	}
	defer resp.Body.Close()
	n, err := io.Copy(w, wire.NewFrameReader(op, heard{resp.Body, quiet}))
	return n, quiet.blame(op, "", err)
}

// Write implements files.FS. Nothing is replaced unless the platform got all
// of r.
func (f *Files) Write(ctx context.Context, path string, r io.Reader, o files.WriteOptions) (files.Info, error) {
	q := url.Values{}
	setID(q, "mode", o.Mode, 8)
	setID(q, "uid", o.UID, 10)
	setID(q, "gid", o.GID, 10)
	if o.Parents {
		q.Set("parents", "1")
	}
	if o.Append {
		q.Set("append", "1")
	}
	if o.SHA256 != "" {
		q.Set("sha256", o.SHA256)
	}
	info := &dsecv1.FileInfo{}
	err := f.c.put(ctx, "write file", http.MethodPut, f.path("/files", path, q), r, info)
	return wire.FileInfoFrom(info), err
}

func setID(q url.Values, name string, v *uint32, base int) {
	if v != nil {
		q.Set(name, strconv.FormatUint(uint64(*v), base))
	}
}

// Download implements files.FS.
func (f *Files) Download(ctx context.Context, dir string, w io.Writer, o files.TreeOptions) error {
	q := url.Values{"framed": {"1"}, "glob": o.Globs}
	if o.Max > 0 {
		q.Set("max", strconv.FormatInt(o.Max, 10))
	}
	_, err := f.get(ctx, "download "+dir, f.path("/tree", dir, q), w)
	return err
}

// Upload implements files.FS.
func (f *Files) Upload(ctx context.Context, dir string, r io.Reader, o files.TreeOptions) error {
	q := url.Values{}
	setID(q, "uid", o.UID, 10)
	setID(q, "gid", o.GID, 10)
	return f.c.put(ctx, "upload tree", http.MethodPut, f.path("/tree", dir, q), r, nil)
}

// raw sends a request to a raw endpoint. An answer that is no success is
// returned as its error.
func (c *Client) raw(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	bare, _, _ := strings.Cut(path, "?")
	op := method + " " + bare
	req, err := http.NewRequestWithContext(ctx, method, c.base.String()+path, body)
	if err != nil {
		return nil, dsec.E(dsec.Invalid, op, "", err)
	}
	auth{c.key}.set(req.Header)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, wire.FromConnect(op, err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		defer resp.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		return nil, wire.HTTPError(op, resp.StatusCode, b)
	}
	return resp, nil
}

// put streams r to a raw endpoint and reads the JSON answer into m (nil: its
// content does not matter).
func (c *Client) put(ctx context.Context, op, method, path string, r io.Reader, m proto.Message) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := c.newSilence(cancel)
	defer quiet.stop()
	resp, err := c.raw(ctx, method, path, sent{r, quiet})
	if err != nil {
		return quiet.blame(op, "", err)
	}
	return answer(op, resp, m)
}

func answer(op string, resp *http.Response, m proto.Message) error {
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxMessage))
	if err == nil && !json.Valid(b) {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && m != nil {
		err = wire.JSON{}.Unmarshal(b, m)
	}
	if err != nil {
		return dsec.E(dsec.Unavailable, op, "", err)
	}
	return nil
}
