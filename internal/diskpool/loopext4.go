package diskpool

import (
	"context"

	"github.com/opendsec/dsec"
)

func openLoop(context.Context, Options) (Pool, error) {
	return nil, dsec.Errorf(dsec.Unsupported, "open disk pool", "", "not built")
}

func openProject(context.Context, Options) (Pool, error) {
	return nil, dsec.Errorf(dsec.Unsupported, "open disk pool", "", "not built")
}
