// Package files is the contract of the file service of a sandbox and its
// implementation over a root it can never leave.
//
// Every path is absolute inside the sandbox and is resolved there, as the
// asking user, with that user's rights. Symbolic links are followed inside the
// root; magic links are not. An error names the operation and the path and has
// one of the classes FileNotFound, IsADirectory, NotADirectory, FileExists,
// PermissionDenied, NoSpace, Invalid, Timeout or SandboxGone. Every operation
// ends when its context does. All methods may be called concurrently.
package files

import (
	"context"
	"io"
	"time"
)

// Kind is the type of a directory entry.
type Kind string

// The kinds.
const (
	File    Kind = "file"
	Dir     Kind = "dir"
	Symlink Kind = "symlink"
	Other   Kind = "other" // fifo, socket, device
)

// Info describes an entry, links not followed unless said.
type Info struct {
	Path   string // as asked; in a listing joined with the entry's name
	Kind   Kind
	Size   int64
	Mode   uint32 // permission bits with setuid, setgid, sticky
	UID    uint32 // inside the sandbox
	GID    uint32
	Owner  string // name in the sandbox's /etc/passwd, or the number
	Group  string
	MTime  time.Time
	Target string // of a symlink
	Links  uint64
}

// WriteOptions of Write. Nil pointers keep what exists, or the default.
type WriteOptions struct {
	Mode    *uint32 // default 0644, or what the replaced file had
	UID     *uint32 // default the asking user; parents made on the way get it too
	GID     *uint32
	Parents bool   // make missing parents, 0755
	SHA256  string // hex; if set and different, nothing is replaced: Corrupt
	Append  bool   // not atomic: bytes are added to the file as it is
}

// TreeOptions of Upload and Download.
type TreeOptions struct {
	UID   *uint32 // Upload: owner of everything; nil: what the tar says
	GID   *uint32
	Globs []string // Download: only paths below dir that match one ("**" crosses directories)
	Max   int64    // Download: most bytes; 0 no cap; beyond it ResourceExhausted
}

// Attr is what SetAttr changes; nil leaves it.
type Attr struct {
	Mode  *uint32
	UID   *uint32
	GID   *uint32
	MTime *time.Time
}

// FS is the file service as one user of one sandbox.
type FS interface {
	// Stat follows a final symlink only if follow is set.
	Stat(ctx context.Context, path string, follow bool) (Info, error)
	// List returns the entries of a directory (a symlink to one is followed),
	// by name, recursively to depth (1 is the directory itself); at most 100,000.
	List(ctx context.Context, path string, depth int) ([]Info, error)
	// Read copies [offset, offset+length) of a regular file to w; length < 0 is to
	// the end. It returns the number of bytes copied.
	Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error)
	// Write replaces a file atomically: after an error the old content is there.
	Write(ctx context.Context, path string, r io.Reader, o WriteOptions) (Info, error)
	// Mkdir makes a directory; with parents an existing one is no error.
	Mkdir(ctx context.Context, path string, mode uint32, parents bool) error
	Move(ctx context.Context, from, to string) error
	// Remove removes a file, or a tree if recursive. Links are never followed.
	Remove(ctx context.Context, path string, recursive bool) error
	SetAttr(ctx context.Context, path string, a Attr) error
	// Download writes dir as a tar: links kept as links, hard links, sparse
	// files, xattrs, owners and times kept.
	Download(ctx context.Context, dir string, w io.Writer, o TreeOptions) error
	// Upload unpacks a tar below dir. Names that would leave dir are Invalid.
	Upload(ctx context.Context, dir string, r io.Reader, o TreeOptions) error
}

// Op is what Watch saw.
type Op string

// The ops.
const (
	OpCreate Op = "create"
	OpWrite  Op = "write"
	OpRemove Op = "remove"
	OpAttr   Op = "attr"
	OpLost   Op = "lost" // events were dropped: list again
	// OpWatching is the first: from now on changes are seen. Its path is dir.
	OpWatching Op = "watching"
)

// Change is one change below a watched directory.
type Change struct {
	Path string
	Op   Op
}

// Watcher is an FS that can watch.
type Watcher interface {
	// Watch calls fn once with OpWatching when it is in place, and then for each
	// change below dir, until ctx ends or fn errs.
	Watch(ctx context.Context, dir string, recursive bool, fn func(Change) error) error
}
