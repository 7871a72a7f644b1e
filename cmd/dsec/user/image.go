package user

import (
	"context"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Image is the group of verbs for images.
func Image() *cobra.Command {
	c := &cobra.Command{
		Use:   "image",
		Short: "Import, list and remove images",
		Long: `An image is what a sandbox is created from: a root file system with, mostly, the user,
environment and command that it came with. It is named by a tag, by the reference it was
pulled by, or by its digest. What is built to go above one is a layer: dsec layer.`,
		Example: "  dsec image import docker.io/library/debian:12 --tag debian:12\n  dsec image ls",
	}
	c.AddCommand(imageImport(), imageEnsure(), imageLs(), imageInspect(), imageRm(), imageMerge(), imageExport(), imageAddDisk())
	return c
}

func imageImport() *cobra.Command {
	var tag string
	c := &cobra.Command{
		Use:   "import REFERENCE|FILE|DIR",
		Short: "Make a layer of an image",
		Long: `The server fetches an OCI reference. A file here (docker save, OCI archive or root file
system tar) or a directory (OCI layout or root file system) is sent to it; "-" is stdin.
With a leading "server:" it is a path on the server below a root it allows. What begins
with ./ ../ / or ~, or ends with /, is a path and never a reference.`,
		Example:           "  dsec image import docker.io/library/debian:12 --tag debian:12\n  docker save app | dsec image import - --tag app:v1",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				said := tagging(ctx, c, cl, tag)
				l, err := importFrom(ctx, c, cl, args[0], tag)
				if err != nil {
					return err
				}
				said(l.Digest)
				return showLayer(c, l)
			})
		},
	}
	c.Flags().StringVar(&tag, "tag", "", "tag that points to it (default: none, its digest names it)")
	return c
}

func importFrom(ctx context.Context, c *cobra.Command, cl *client.Client, from, tag string) (client.Layer, error) {
	if from == "-" {
		b := newBar(c, "send", 0, size)
		defer b.done()
		return cl.UploadImage(ctx, counting{r: c.InOrStdin(), b: b}, tag)
	}
	st, there, err := source(from)
	switch {
	case err != nil:
		return client.Layer{}, err
	case st != nil && !st.IsDir():
		f, err := os.Open(from)
		if err != nil {
			return client.Layer{}, hostError("read", from, err)
		}
		defer f.Close()
		b := newBar(c, "send", st.Size(), size)
		defer b.done()
		return cl.UploadImage(ctx, counting{r: f, b: b}, tag)
	case st != nil:
		b := newBar(c, "send", 0, size)
		defer b.done()
		return sendDir(ctx, from, false, func(r io.Reader) (client.Layer, error) {
			return cl.UploadImage(ctx, counting{r: r, b: b}, tag)
		})
	}
	b := newBar(c, "import", 0, size)
	defer b.done()
	return cl.Import(ctx, there, tag, b.progress)
}

func imageLs() *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List what was imported as an image",
		Long: `The bases sandboxes are created from. CONFIG none: a root file system that came without
environment, user and command; a sandbox has the defaults then.`,
		Example:           "  dsec image ls\n  dsec image ls -o json",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				all, err := cl.Layers(ctx)
				if err != nil {
					return err
				}
				return showLayers(c, imagesOf(all), "CONFIG", configured)
			})
		},
	}
}

func imagesOf(all []client.Layer) []client.Layer {
	return slices.DeleteFunc(slices.Clone(all), func(l client.Layer) bool { return !l.Image })
}

func configured(l client.Layer) string {
	if l.Config == nil {
		return "none"
	}
	return "yes"
}

func imageInspect() *cobra.Command {
	c := layerInspect()
	c.Use, c.Short, c.Example = "inspect IMAGE", "Print all that is known of an image, or of a packed disk", "  dsec image inspect debian:12"
	return c
}

func imageRm() *cobra.Command {
	return &cobra.Command{
		Use:               "rm IMAGE...",
		Short:             "Drop tags, or layers by digest that nobody uses",
		Example:           "  dsec image rm debian:12",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeLayers,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				for _, ref := range args {
					existed, err := cl.RemoveLayer(ctx, dsec.LayerRef(ref))
					if err == nil && !existed {
						err = dsec.Errorf(dsec.NotFound, "remove image", dsec.Quote(ref), "there is none")
					}
					if err != nil {
						return err
					}
					if err := show(c, removed{ref, existed}, printLine(ref)); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}
