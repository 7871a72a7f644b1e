package layer

import (
	"encoding/json"

	"github.com/opendsec/dsec"
)

// MaxLineage bounds an encoded lineage, in bytes.
const MaxLineage = 64 << 10

// DecodeLineage reads the lineage of a packed layer, which came from elsewhere.
func DecodeLineage(b []byte) (*dsec.Lineage, error) {
	const op = "read lineage"
	if len(b) > MaxLineage {
		return nil, dsec.Errorf(dsec.Corrupt, op, "", "%d bytes, at most %d", len(b), MaxLineage)
	}
	l := &dsec.Lineage{}
	if err := json.Unmarshal(b, l); err != nil {
		return nil, dsec.E(dsec.Corrupt, op, "", err)
	}
	if l.Version != dsec.LineageVersion {
		return nil, dsec.Errorf(dsec.Unsupported, op, "", "version %d, this program knows %d", l.Version, dsec.LineageVersion)
	}
	if len(l.Parents) >= MaxStack {
		return nil, dsec.Errorf(dsec.Corrupt, op, "", "%d parents, at most %d", len(l.Parents), MaxStack-1)
	}
	for _, p := range append(l.Parents[:len(l.Parents):len(l.Parents)], l.Merged...) {
		if _, err := ParseDigest(p); err != nil {
			return nil, err
		}
	}
	return l, nil
}
