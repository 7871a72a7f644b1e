package files

import (
	"context"
	"encoding/binary"
	"io"

	"github.com/opendsec/dsec"
)

const maxItem = 48 << 10 // of a listing

// Stat implements FS.
func (c *Client) Stat(ctx context.Context, path string, follow bool) (Info, error) {
	return c.info(ctx, &call{op: callStat, path: path, flag: follow}, nil)
}

func (c *Client) info(ctx context.Context, k *call, body io.Reader) (Info, error) {
	r, err := c.do(ctx, k, body, nil)
	if err != nil {
		return Info{}, err
	}
	if r.info == nil {
		return Info{}, dsec.E(dsec.Internal, opNames[k.op], dsec.Quote(k.path), errProtocol)
	}
	r.info.Path = k.path
	return *r.info, nil
}

// List implements FS.
func (c *Client) List(ctx context.Context, path string, depth int) ([]Info, error) {
	var out []Info
	total := 0
	k := &call{op: callList, path: path, depth: uint32(min(max(depth, 1), maxDepth))}
	_, err := c.do(ctx, k, nil, func(r io.Reader) error {
		return items(r, func(d *decoder) error {
			i := d.info()
			if total += len(i.Path) + len(i.Target); len(out) >= maxEntries || total > maxListed {
				return errProtocol
			}
			out = append(out, i)
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// items takes length-prefixed items off a body.
func items(r io.Reader, fn func(*decoder) error) error {
	var head [4]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		n := binary.BigEndian.Uint32(head[:])
		if n > maxItem {
			return errProtocol
		}
		d := decoder{b: make([]byte, n)}
		if _, err := io.ReadFull(r, d.b); err != nil {
			return err
		}
		if err := fn(&d); err != nil {
			return err
		}
		if err := d.end(); err != nil {
			return err
		}
	}
}

// Read implements FS.
func (c *Client) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	n := int64(0)
	_, err := c.do(ctx, &call{op: callRead, path: path, offset: offset, length: length}, nil, func(r io.Reader) (err error) {
		n, err = copyBody(w, r)
		return err
	})
	return n, err
}

func copyBody(w io.Writer, r io.Reader) (int64, error) {
	return io.CopyBuffer(onlyWriter{w}, onlyReader{r}, make([]byte, maxPayload))
}

// onlyReader and onlyWriter hide other methods, whose copying would ignore the
// buffer.
type onlyReader struct{ io.Reader }
type onlyWriter struct{ io.Writer }

// Write implements FS.
func (c *Client) Write(ctx context.Context, path string, r io.Reader, o WriteOptions) (Info, error) {
	return c.info(ctx, &call{op: callWrite, path: path, to: o.SHA256, mode: o.Mode, uid: o.UID, gid: o.GID, flag: o.Parents, append: o.Append}, r)
}

// Mkdir implements FS.
func (c *Client) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	_, err := c.do(ctx, &call{op: callMkdir, path: path, mode: &mode, flag: parents}, nil, nil)
	return err
}

// Move implements FS.
func (c *Client) Move(ctx context.Context, from, to string) error {
	if err := check(ctx, opMove, to); err != nil {
		return err
	}
	_, err := c.do(ctx, &call{op: callMove, path: from, to: to}, nil, nil)
	return err
}

// Remove implements FS.
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error {
	_, err := c.do(ctx, &call{op: callRemove, path: path, flag: recursive}, nil, nil)
	return err
}

// SetAttr implements FS.
func (c *Client) SetAttr(ctx context.Context, path string, a Attr) error {
	_, err := c.do(ctx, &call{op: callSetAttr, path: path, mode: a.Mode, uid: a.UID, gid: a.GID, mtime: a.MTime}, nil, nil)
	return err
}

// Download implements FS.
func (c *Client) Download(ctx context.Context, dir string, w io.Writer, o TreeOptions) error {
	if _, err := compileGlobs(opDownload, o.Globs); err != nil {
		return err
	}
	_, err := c.do(ctx, &call{op: callDownload, path: dir, globs: o.Globs, length: o.Max}, nil, func(r io.Reader) error {
		_, err := copyBody(w, r)
		return err
	})
	return err
}

// Upload implements FS.
func (c *Client) Upload(ctx context.Context, dir string, r io.Reader, o TreeOptions) error {
	_, err := c.do(ctx, &call{op: callUpload, path: dir, uid: o.UID, gid: o.GID}, r, nil)
	return err
}

// Watch implements Watcher.
func (c *Client) Watch(ctx context.Context, dir string, recursive bool, fn func(Change) error) error {
	_, err := c.do(ctx, &call{op: callWatch, path: dir, flag: recursive}, nil, func(r io.Reader) error {
		return items(r, func(d *decoder) error {
			ch := d.change()
			if d.bad {
				return errProtocol
			}
			return fn(ch)
		})
	})
	return err
}
