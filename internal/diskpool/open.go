package diskpool

import (
	"context"

	"github.com/opendsec/dsec"
)

// Open probes the mechanisms and opens or makes the pool.
func Open(ctx context.Context, o Options) (Pool, error) {
	return nil, dsec.Errorf(dsec.Unsupported, "open disk pool", o.Dir, "not built yet")
}
