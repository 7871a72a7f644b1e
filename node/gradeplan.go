package node

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/snapshot"
)

const (
	opaqueMark    = "trusted.overlay.opaque"
	gradeEvidence = 16 // refused paths that are named
	gradeDepth    = 512
)

// errUnfit is of declared paths that hold what no grading takes: the agent's doing.
var errUnfit = errors.New("no grading takes it")

// unfit says so of an error of the fresh sandbox that comes of what is put there.
func unfit(err error) error {
	switch dsec.ClassOf(err) {
	case dsec.Invalid, dsec.PermissionDenied, dsec.NoSpace, dsec.FileNotFound, dsec.FileExists, dsec.IsADirectory, dsec.NotADirectory:
		return fmt.Errorf("%w: %w", errUnfit, err)
	}
	return err
}

// gradePlan is what of a packed disk goes into a fresh sandbox: of the declared
// paths only, and of what is there only directories, regular files and links.
// It is made of the packed disk, which nobody changes any more; nothing of the
// sandbox runs or is asked.
type gradePlan struct {
	ctx     context.Context
	exclude []files.Glob
	grader  *snapshot.Below // layers that only the grader has; nil: none

	remove  []string // in this order, before anything is put there
	entries []gradeEntry
	applied dsec.Applied
	why     []string
	links   map[uint64]string // first name of an inode with several
}

type gradeEntry struct {
	path string
	node *erofs.Node
	link string // an earlier entry that is the same file
	bare bool   // nothing is below it in the fresh sandbox
}

func (p *gradePlan) refuse(name, format string, args ...any) {
	p.applied.Refused++
	if len(p.why) < gradeEvidence {
		p.why = append(p.why, "not taken: "+dsec.Quote(name)+": "+fmt.Sprintf(format, args...))
	}
}

// declare takes one declared path. Those above it are only gone through: what
// else the agent did there is not declared.
func (p *gradePlan) declare(im *erofs.Image, name string) error {
	n, err := im.Root()
	if err != nil {
		return err
	}
	parts, hidden := strings.Split(strings.Trim(name, "/"), "/"), false
	for i, part := range parts {
		c, err := n.Lookup(part)
		if err != nil {
			return err
		}
		switch at := "/" + strings.Join(parts[:i+1], "/"); {
		case c == nil && hidden, c != nil && c.IsWhiteout() && i < len(parts)-1:
			p.gone(name)
			return nil
		case c == nil: // as it was
			return nil
		case i == len(parts)-1:
			if hidden {
				p.remove = append(p.remove, name)
			}
			return p.take(name, c, hidden)
		case c.Mode&erofs.TypeMask != erofs.TypeDir:
			p.refuse(name, "%s is not a directory any more", dsec.Quote(at))
			p.gone(name)
			return nil
		}
		opaque, err := isOpaque(c)
		if err != nil {
			return err
		}
		hidden, n = hidden || opaque, c
	}
	return nil
}

func (p *gradePlan) gone(name string) {
	p.applied.Removed++
	p.remove = append(p.remove, name)
}

func isOpaque(n *erofs.Node) (bool, error) {
	xs, err := n.Xattrs()
	return slices.ContainsFunc(xs, func(x erofs.Xattr) bool { return x.Name == opaqueMark && string(x.Value) == "y" }), err
}

// take takes a path and what is below it. hidden: nothing of the layers is seen there.
func (p *gradePlan) take(name string, n *erofs.Node, hidden bool) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if p.excluded(name) {
		return nil
	}
	kind := n.Mode & erofs.TypeMask
	if theirs, err := p.graders(name); err != nil {
		return err
	} else if theirs != nil && (kind != erofs.TypeDir || theirs.Mode&erofs.TypeMask != erofs.TypeDir) {
		p.refuse(name, "a layer of the grader has it")
		return nil
	}
	switch {
	case kind != erofs.TypeDir && dsec.Within(dsec.GradeDir, name) && !n.IsWhiteout():
		p.refuse(name, "it is on the way to the reward")
		return nil
	case n.IsWhiteout():
		if !hidden {
			p.gone(name)
		}
		return nil
	case kind == erofs.TypeDir:
		return p.takeDir(name, n, hidden)
	case kind == erofs.TypeRegular, kind == erofs.TypeSymlink:
		return p.add(gradeEntry{path: name, node: n, bare: hidden})
	}
	p.refuse(name, "a device, pipe or socket")
	return nil
}

func (p *gradePlan) takeDir(name string, n *erofs.Node, hidden bool) error {
	if strings.Count(name, "/") > gradeDepth {
		return fmt.Errorf("%w: deeper than %d directories", errUnfit, gradeDepth)
	}
	opaque, err := isOpaque(n)
	if err != nil {
		return err
	}
	if opaque && !hidden {
		p.remove = append(p.remove, name)
	}
	if err := p.add(gradeEntry{path: name, node: n, bare: true}); err != nil {
		return err
	}
	all, err := n.Entries()
	if err != nil {
		return err
	}
	for _, e := range all {
		c, err := n.Open(e)
		if err != nil {
			return err
		}
		if err := p.take(path.Join(name, e.Name), c, hidden || opaque); err != nil {
			return err
		}
	}
	return nil
}

func (p *gradePlan) add(e gradeEntry) error {
	if e.node.Mode&erofs.TypeMask == erofs.TypeRegular {
		if first, again := p.links[e.node.NID]; again {
			e.link = first
		} else {
			if p.applied.Bytes += e.node.Size; p.applied.Bytes > dsec.MaxGradeBytes || e.node.Size > dsec.MaxGradeBytes {
				return fmt.Errorf("%w: %d bytes, at most %d", errUnfit, p.applied.Bytes, int64(dsec.MaxGradeBytes))
			}
			if e.node.Nlink > 1 {
				p.links[e.node.NID] = e.path
			}
		}
	}
	if p.applied.Files++; p.applied.Files > dsec.MaxGradeCount {
		return fmt.Errorf("%w: more than %d files", errUnfit, dsec.MaxGradeCount)
	}
	p.entries = append(p.entries, e)
	return nil
}

func (p *gradePlan) excluded(name string) bool {
	return dsec.Within(name, dsec.GradeDir) || slices.ContainsFunc(p.exclude, func(g files.Glob) bool { return g.Match(strings.Trim(name, "/")) })
}

// graders is what the layers of the grader have at a path.
func (p *gradePlan) graders(name string) (*erofs.Node, error) {
	if p.grader == nil {
		return nil, nil
	}
	return p.grader.Find(strings.Trim(name, "/"))
}

// tar writes the entries: without attributes, without setuid bits, and readable
// by who will own them.
func (p *gradePlan) tar(w io.Writer) error {
	tw := tar.NewWriter(w)
	for _, e := range p.entries {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		h := &tar.Header{Name: strings.Trim(e.path, "/"), Mode: int64(e.node.Mode)&0o777 | 0o600, ModTime: time.Unix(e.node.Mtime, 0), Format: tar.FormatPAX}
		var from io.Reader
		switch kind := e.node.Mode & erofs.TypeMask; {
		case kind == erofs.TypeDir:
			h.Typeflag, h.Name, h.Mode = tar.TypeDir, h.Name+"/", h.Mode|0o100
		case e.link != "":
			h.Typeflag, h.Linkname = tar.TypeLink, strings.Trim(e.link, "/")
		case kind == erofs.TypeSymlink:
			to, err := e.node.Target()
			if err != nil {
				return err
			}
			h.Typeflag, h.Linkname = tar.TypeSymlink, to
		default:
			r, err := e.node.Contents()
			if err != nil {
				return err
			}
			h.Typeflag, h.Size, from = tar.TypeReg, e.node.Size, r
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if from != nil {
			if _, err := io.Copy(tw, from); err != nil {
				return err
			}
		}
	}
	return tw.Close()
}
