// Package layer keeps immutable layers on a node: content-addressed, verified,
// leased while in use, collected when not.
//
// A layer is two files: metadata (an EROFS image without data, small, always
// local and complete) and data (the device the metadata points into). Its
// digest covers both, see docs/formats/layer.md.
package layer

import (
	"context"
	"io"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// Digest is "sha256:" and 64 hex digits, nothing else; anything else from
// outside is refused before it is used as a name.
type Digest string

// Info describes a layer without touching its data.
type Info struct {
	Digest   Digest        `json:"digest"`
	MetaSize int64         `json:"meta_size"`       // bytes
	DataSize int64         `json:"data_size"`       // bytes, plain
	Entries  int64         `json:"entries"`         // inodes
	Source   string        `json:"source"`          // where it came from, for people
	Image    bool          `json:"image,omitempty"` // made of a whole root file system: a base; not part of the digest
	Config   *image.Config `json:"config,omitempty"`
	// Layers are those of a stack, the lowest first, and Digest is the stack's;
	// sizes and entries are theirs together. Of a layer there are none.
	Layers []Part `json:"layers,omitempty"`
	// Lineage is there if it was packed from a sandbox's disk; not part of the digest.
	Lineage *dsec.Lineage `json:"lineage,omitempty"`
}

// IsStack reports whether it is a stack and no layer.
func (i Info) IsStack() bool { return len(i.Layers) > 0 }

// Local is a layer that is whole on this machine. The files do not change and
// do not go away while the lease that came with it is held.
type Local struct {
	Info
	Meta string // host path of the metadata file
	Data string // host path of the data file; empty when DataSize is 0
}

// Set is an ordered stack of whole layers, bottom first, and the lease that
// keeps them.
type Set struct {
	Lease  string // name given by the caller, usually the sandbox id
	Layers []Local
	Config image.Config // of the base, overlaid by those above
}

// Tag is a name for a layer, and whose it is. A tag of a project is seen and
// moved by that project only; one of nobody is seen by everybody and moved by
// admins. There is one namespace: a name that is taken is taken for all.
type Tag struct {
	Name    string
	Project string    // "": nobody's
	Expires time.Time // zero: never; then the tag goes, and the layer if nothing else keeps it
}

// New describes a layer whose two files the caller writes.
type New struct {
	Source string        // where it comes from, for people
	Config *image.Config // kept with the layer; may be nil
	Tag    Tag           // without a name: none
}

// Store is what a node needs of the layer store.
type Store interface {
	// For is the store as a project sees it: of tags only its own and those of
	// nobody. "" sees all, as does the store itself.
	For(project string) Store
	// Acquire resolves refs (tags or digests of layers or stacks, bottom first),
	// makes the layers whole and verified here, and leases them under the name
	// until Release. A stack stands for its layers, and a packed layer that is the
	// lowest for those it was packed on and itself; a layer that is there twice
	// counts where it is highest. At most MaxStack layers in all. The same name
	// and refs again return the same set. NotFound names the ref.
	Acquire(ctx context.Context, lease string, refs []dsec.LayerRef) (Set, error)
	// Release ends a lease. Unknown names are no error.
	Release(ctx context.Context, lease string) error
	// Leases lists the names held, so that a restarted node can drop strays.
	Leases(ctx context.Context) ([]string, error)
	// OpenData opens the data of a layer that is leased, to read any of them here
	// until ctx ends: what is not on this machine is fetched as it is read.
	OpenData(ctx context.Context, l Local) (Data, error)
}

// Data are the contents of a layer, as its metadata points into them.
type Data interface {
	io.ReaderAt
	io.Closer
}

// IsTemplate reports whether it is a stack that binds a name to parts.
func (i Info) IsTemplate() bool { return i.IsStack() && i.Layers[0].Role != "" }
