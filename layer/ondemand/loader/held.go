package loader

import (
	"context"

	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/rootfs"
)

// IsKept says whether the Keeper has what a device came by: its session
// (rootfs.Device.Session) has not ended, or nobody has taken note of its end.
func IsKept(ctx context.Context, k rootfs.Keeper, d layer.Digest, session string) (bool, error) {
	names, err := k.Names(ctx, prefix+d.Hex()+"/"+session+"/")
	return len(names) > 0, err
}
