package store

import (
	"context"
	"io"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
)

// Export writes an image or layer as an OCI image archive: an OCI layer for
// each layer, which an import makes the same tree of. Directories that were
// renamed in a layer, which OCI cannot say, make one OCI layer of all.
func (s *Store) Export(ctx context.Context, ref dsec.LayerRef, w io.Writer) error {
	const op = "export image"
	parts, config, err := s.Flatten(ctx, []dsec.LayerRef{ref})
	if err != nil {
		return err
	}
	var images []*erofs.Image
	for _, p := range parts {
		im, closeIt, err := s.image(p.Digest)
		if err != nil {
			return diskError(op, string(ref), err)
		}
		defer closeIt()
		images = append(images, im)
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "export-*")
	if err != nil {
		return diskError(op, string(ref), err)
	}
	defer os.RemoveAll(dir)
	var files image.Files
	if err := create(dir, &files); err != nil {
		return diskError(op, string(ref), err)
	}
	defer closeAll(files)
	moved, err := image.HasRedirects(images)
	if err == nil && moved {
		images, err = s.exportMerged(ctx, images, files)
	}
	if err == nil {
		err = image.WriteArchive(ctx, images, &config, image.Archive{Name: string(ref), Scratch: filepath.Clean(dir)}, w)
	}
	if err != nil {
		return diskError(op, string(ref), err)
	}
	return nil
}

func (s *Store) exportMerged(ctx context.Context, images []*erofs.Image, files image.Files) ([]*erofs.Image, error) {
	res, err := image.Merge(ctx, images, files, image.MergeOptions{})
	if err != nil {
		return nil, err
	}
	im, err := erofs.Open(files.Meta, res.MetaSize, files.Data)
	return []*erofs.Image{im}, err
}
