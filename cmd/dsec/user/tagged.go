package user

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/layer"
)

// tagging looks up what a name means before a verb makes it mean something, and
// returns what then says on stderr that it meant another thing. Whoever moves
// the name in between is not seen: it is a help against typing errors.
func tagging(ctx context.Context, c *cobra.Command, cl *client.Client, tag string) (say func(now layer.Digest)) {
	if tag == "" {
		return func(layer.Digest) {}
	}
	was, err := cl.InspectLayer(ctx, dsec.LayerRef(tag))
	return func(now layer.Digest) {
		// A reference that was pulled is found by its name, too, and is no tag.
		if err == nil && was.Digest != now && slices.Contains(was.Tags, tag) {
			fmt.Fprintf(c.ErrOrStderr(), "dsec: %s pointed to %s %s before\n", safe(tag), kind(was), was.Digest)
		}
	}
}
