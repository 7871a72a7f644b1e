package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/opendsec/dsec/image/erofs"
)

const paxXattr = "SCHILY.xattr."

// tarLayer is a layer in a tar stream. open is called once per pass.
type tarLayer struct {
	open func(ctx context.Context) (io.ReadCloser, error)
	oci  bool
}

func (l tarLayer) whiteouts() bool { return l.oci }

func (l tarLayer) each(ctx context.Context, fn func(*entry, io.Reader) error) error {
	r, err := l.open(ctx)
	if err != nil {
		return err
	}
	err = eachTar(ctx, r, fn)
	if err == nil {
		// What follows the end mark still counts for the digest.
		_, err = io.Copy(io.Discard, r)
	}
	return errors.Join(err, r.Close())
}

func eachTar(ctx context.Context, r io.Reader, fn func(*entry, io.Reader) error) error {
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read tar: %w", err)
		}
		e, err := tarEntry(h)
		if err != nil {
			return err
		}
		if e == nil {
			continue
		}
		if err := fn(e, tr); err != nil {
			return err
		}
	}
}

// tarEntry translates a header; nil means that it describes no file.
func tarEntry(h *tar.Header) (*entry, error) {
	e := &entry{mode: uint32(h.Mode) & 0o7777, mtime: h.ModTime.Unix(), nsec: uint32(h.ModTime.Nanosecond())}
	var err error
	if e.name, err = cleanName(h.Name); err != nil {
		return nil, err
	}
	switch h.Typeflag {
	case tar.TypeReg, '\x00', tar.TypeCont, tar.TypeGNUSparse:
		if strings.HasSuffix(h.Name, "/") { // old tars have no type for directories
			e.mode |= erofs.TypeDir
			break
		}
		e.mode |= erofs.TypeRegular
		e.size = h.Size
	case tar.TypeDir:
		e.mode |= erofs.TypeDir
	case tar.TypeSymlink:
		e.mode |= erofs.TypeSymlink
		e.target = h.Linkname
	case tar.TypeLink:
		e.isLink = true
		if e.link, err = cleanName(h.Linkname); err != nil {
			return nil, fmt.Errorf("hard link %q: %w", h.Name, err)
		}
	case tar.TypeChar:
		e.mode |= erofs.TypeChar
	case tar.TypeBlock:
		e.mode |= erofs.TypeBlock
	case tar.TypeFifo:
		e.mode |= erofs.TypeFifo
	case tar.TypeXGlobalHeader, 'V':
		return nil, nil
	default:
		return nil, fmt.Errorf("member %q: unknown type %q", h.Name, h.Typeflag)
	}
	if err := tarNumbers(e, h); err != nil {
		return nil, fmt.Errorf("member %q: %w", h.Name, err)
	}
	for k, v := range h.PAXRecords {
		if name, ok := strings.CutPrefix(k, paxXattr); ok && erofs.KnownXattr(name) {
			e.xattrs = append(e.xattrs, erofs.Xattr{Name: name, Value: []byte(v)})
		}
	}
	return e, nil
}

func tarNumbers(e *entry, h *tar.Header) error {
	for _, id := range []int{h.Uid, h.Gid} {
		if id < 0 || id >= math.MaxUint32 {
			return fmt.Errorf("owner %d:%d: out of range", h.Uid, h.Gid)
		}
	}
	e.uid, e.gid = uint32(h.Uid), uint32(h.Gid)
	if t := e.mode & erofs.TypeMask; t == erofs.TypeChar || t == erofs.TypeBlock {
		if h.Devmajor < 0 || h.Devmajor >= 1<<12 || h.Devminor < 0 || h.Devminor >= 1<<20 {
			return fmt.Errorf("device %d:%d: out of range", h.Devmajor, h.Devminor)
		}
		e.rdev = erofs.Rdev(uint32(h.Devmajor), uint32(h.Devminor))
	}
	return nil
}
