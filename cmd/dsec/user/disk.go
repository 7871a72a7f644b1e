package user

import (
	"context"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/diskimage"
)

type diskManifest = diskimage.Manifest

// addDisk sends a disk as the tree of a layer.
func addDisk(ctx context.Context, c *cobra.Command, cl *client.Client, args []string, how func(*diskManifest)) (client.Layer, error) {
	f, err := os.Open(args[1])
	if err != nil {
		return client.Layer{}, hostError("read", args[1], err)
	}
	defer f.Close()
	disk, err := diskimage.Read(f)
	if err != nil {
		return client.Layer{}, err
	}
	m := diskimage.New(disk.Size)
	how(&m)
	if err := m.Check(); err != nil {
		return client.Layer{}, err
	}
	r, w := io.Pipe()
	defer r.Close()
	sent := make(chan error, 1)
	go func() {
		err := diskimage.WriteTar(w, m, disk)
		sent <- err
		_ = w.CloseWithError(err)
	}()
	b := newBar(c, "send", m.Size, size)
	defer b.done()
	l, err := cl.UploadImage(ctx, counting{r: r, b: b}, args[0])
	if err != nil {
		_ = r.CloseWithError(err)
		if serr := <-sent; serr != nil && serr != err { //nolint:errorlint // the very one that was handed over
			return l, serr // why nothing more came
		}
	}
	return l, err
}
