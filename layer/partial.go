package layer

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
)

// Files of a layer in its directory on a node, see docs/formats/layer.md.
const (
	ManifestFile = "manifest"
	MetaFile     = "meta"
	DataFile     = "data"
	TableFile    = "chunks"
	InfoFile     = "info"
	TraceFile    = "trace"   // what is read first, if anybody has recorded it
	IndexFile    = "index"   // only while the data are not whole
	PresentFile  = "present" // likewise: while there is one, the data file has holes
)

// Whole says whether all data of the layer are on this machine. While they are
// not, nobody may read the data file but through what fetches them.
func (l Local) Whole() (bool, error) {
	if l.DataSize == 0 {
		return true, nil
	}
	_, err := os.Stat(filepath.Join(filepath.Dir(l.Data), PresentFile))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, dsec.E(dsec.Internal, "look at layer", string(l.Digest), err)
	}
	return false, nil
}
