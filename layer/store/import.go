package store

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// Import makes a layer of a source (see image.Locate) and points the tag to it,
// unless the tag is empty. Concurrent imports of one source with equal options
// convert it once.
func (s *Store) Import(ctx context.Context, source, tag string, opts image.Options) (layer.Info, error) {
	loc, err := image.Locate(source)
	if err != nil {
		return layer.Info{}, err
	}
	return s.ImportAt(ctx, loc, tag, opts)
}

// ImportAt is Import of a source that has been located.
func (s *Store) ImportAt(ctx context.Context, loc image.Location, tag string, opts image.Options) (layer.Info, error) {
	const op = "import layer"
	if err := s.checkTag(tag); err != nil {
		return layer.Info{}, err
	}
	key, err := json.Marshal([]any{loc, opts})
	if err != nil {
		return layer.Info{}, dsec.E(dsec.Internal, op, loc.Source, err)
	}
	info, err := s.once(ctx, string(key), func() (layer.Info, error) {
		return s.convert(ctx, loc, nil, image.Files{}, opts)
	})
	if err != nil || tag == "" {
		return info, err
	}
	return info, s.Tag(ctx, tag, info.Digest)
}

// Tar is a stream to import.
type Tar struct {
	R      io.Reader
	Name   string        // for people
	Config *image.Config // kept with the layer; may be nil
}

// ImportTar makes a layer of a tar stream and points the tag to it, unless the
// tag is empty.
func (s *Store) ImportTar(ctx context.Context, t Tar, tag string, opts image.Options) (layer.Info, error) {
	if err := s.checkTag(tag); err != nil {
		return layer.Info{}, err
	}
	in, fed, err := feed(t.R)
	if err != nil {
		return layer.Info{}, diskError("import layer", t.Name, err)
	}
	loc := image.Location{Source: t.Name, Kind: image.KindFile, Tar: true}
	info, err := s.convert(ctx, loc, t.Config, image.Files{Input: in}, opts)
	in.Close() // stops the feeding if nobody read to the end
	select {
	case fedErr := <-fed:
		if fedErr != nil && !errors.Is(fedErr, unix.EPIPE) {
			// A stream that broke looks like a bad tar to who reads it, or, at the
			// end of a member, like a whole one.
			err = diskError("read tar", t.Name, fedErr)
		}
	case <-ctx.Done(): // a stream that neither ends nor goes on
		err = diskError("read tar", t.Name, ctx.Err())
	}
	if err != nil || tag == "" {
		return info, err
	}
	return info, s.Tag(ctx, tag, info.Digest)
}

// feed turns a stream into a file that another process can read.
func feed(r io.Reader) (*os.File, <-chan error, error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	fed := make(chan error, 1)
	go func() { // ends when r does, or when in is closed
		_, err := io.Copy(out, r)
		fed <- errors.Join(err, out.Close())
	}()
	return in, fed, nil
}

func (s *Store) checkTag(tag string) error {
	if tag == "" {
		return nil
	}
	return s.MayTag(tag)
}

// convert makes a layer of a source, here and in the blob store.
func (s *Store) convert(ctx context.Context, loc image.Location, config *image.Config, files image.Files, opts image.Options) (layer.Info, error) {
	whole := !opts.KeepWhiteouts // stands on nothing
	info, err := s.makeLayer(about{Source: loc.Source, Image: &whole}, func(made image.Files) (image.Result, error) {
		made.Input, made.Layout = files.Input, files.Layout
		res, err := s.opts.Convert(ctx, loc, made, opts)
		if config != nil {
			res.Config = config
		}
		return res, err
	})
	if err == nil {
		err = s.push(ctx, info.Digest)
	}
	if err != nil {
		return layer.Info{}, diskError("import layer", loc.Source, err)
	}
	return info, nil
}

// makeLayer has a layer written in tmp and moves it to its place.
func (s *Store) makeLayer(from about, write func(files image.Files) (image.Result, error)) (layer.Info, error) {
	const op = "import layer"
	dir, err := os.MkdirTemp(s.path("tmp"), "layer-*")
	if err != nil {
		return layer.Info{}, diskError(op, from.Source, err)
	}
	defer os.RemoveAll(dir) // what stays is swept at the next Open
	var files image.Files
	if err := create(dir, &files); err != nil {
		return layer.Info{}, diskError(op, from.Source, err)
	}
	defer closeAll(files)
	res, err := write(files)
	if err != nil {
		return layer.Info{}, diskError(op, from.Source, err)
	}
	info, err := s.seal(dir, files, res.Config, from)
	if err != nil {
		return layer.Info{}, diskError(op, from.Source, err)
	}
	return info, nil
}

// create opens the files of a layer to be.
func create(dir string, files *image.Files) error {
	for name, to := range map[string]**os.File{"meta": &files.Meta, "data": &files.Data, "scratch": &files.Scratch} {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			closeAll(*files)
			return err
		}
		*to = f
	}
	return os.Remove(filepath.Join(dir, "scratch")) // its name is not needed
}

func closeAll(files image.Files) {
	for _, f := range []*os.File{files.Meta, files.Data, files.Scratch} {
		if f != nil {
			f.Close() // synced where it matters
		}
	}
}

// seal reads back what the converter wrote, names it by its digest, and
// publishes it. Nothing the converter says about the files is believed: it may
// have fallen to what it converted, and the kernel will mount them. Chunks end
// where parts of large files do, and at the cuts.
func (s *Store) seal(dir string, files image.Files, config *image.Config, from about, cuts ...int64) (layer.Info, error) {
	im, borders, err := inspect(files)
	if err != nil {
		return layer.Info{}, dsec.E(dsec.Corrupt, "check new layer", from.Source, err)
	}
	for _, f := range []*os.File{files.Meta, files.Data} {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return layer.Info{}, err
		}
	}
	borders = append(borders, cuts...)
	slices.Sort(borders)
	m, ix, err := layer.Describe(files.Meta, files.Data, borders)
	if err != nil {
		return layer.Info{}, err
	}
	if im.DataBlocks()*erofs.BlockSize != uint64(m.Data.Size) {
		return layer.Info{}, dsec.Errorf(dsec.Corrupt, "check new layer", from.Source, "%d blocks of data in a file of %d bytes", im.DataBlocks(), m.Data.Size)
	}
	m.Entries = int64(im.Inodes())
	if m.Config, err = normal(config); err != nil {
		return layer.Info{}, err
	}
	if len(m.Encode()) > layer.MaxManifest {
		return layer.Info{}, dsec.Errorf(dsec.Invalid, "import layer", from.Source, "config of more than %d bytes", layer.MaxManifest)
	}
	return s.finish(dir, m, ix, from)
}

// inspect checks the metadata of a new layer.
func inspect(files image.Files) (im *erofs.Image, borders []int64, err error) {
	st, err := files.Meta.Stat()
	if err != nil {
		return nil, nil, err
	}
	if im, err = erofs.Open(files.Meta, st.Size(), files.Data); err != nil {
		return nil, nil, err
	}
	if err = im.Check(); err != nil {
		return nil, nil, err
	}
	borders, err = im.Borders(layer.LargeFile)
	return im, borders, err
}

// finish puts the small files beside the two large ones and publishes the layer.
func (s *Store) finish(dir string, m layer.Manifest, ix layer.Index, from about) (layer.Info, error) {
	info := layer.Info{Digest: m.Digest(), MetaSize: m.Meta.Size, DataSize: m.Data.Size, Entries: m.Entries,
		Source: from.Source, Image: from.image(m.Config), Config: m.Config, Lineage: from.Lineage}
	if err := s.complement(dir, m, ix, from); err != nil {
		return layer.Info{}, err
	}
	return info, s.publish(dir, info)
}

func alignUp(n int64) int64 { return (n + erofs.Align - 1) / erofs.Align * erofs.Align }

// about is what people want to know of a layer and is no part of it.
type about struct {
	Source string `json:"source"`
	Image  *bool  `json:"image,omitempty"` // imported as a whole root file system; nil: nobody said
	// Lineage of a packed layer.
	Lineage *dsec.Lineage `json:"lineage,omitempty"`
}

// image tells whether a layer is a base. Of one that was fetched nobody said,
// and a configuration is the sign.
func (a about) image(c *image.Config) bool {
	if a.Image == nil {
		return c != nil
	}
	return *a.Image
}

// publish syncs a finished layer and moves it to its place, where an equal one
// may already be.
func (s *Store) publish(dir string, info layer.Info) error {
	if err := syncDir(dir); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err := os.Rename(dir, s.path("layers", info.Digest.Hex()))
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOTEMPTY) {
		return errors.Join(s.touch(info.Digest), s.noteAgainLocked(info)) // the same bytes: new again
	}
	if err != nil {
		return err
	}
	return syncFile(s.path("layers"))
}

// noteAgainLocked notes what was learnt of bytes that were there already: that
// they have been imported as an image, which they stay, and where they were packed
// last.
func (s *Store) noteAgainLocked(info layer.Info) error {
	there, err := s.localLocked(info.Digest)
	if err != nil || (there.Image || !info.Image) && info.Lineage == nil {
		return err
	}
	a := about{Source: there.Source, Image: &there.Image, Lineage: info.Lineage}
	if info.Image && !there.Image {
		a.Source, a.Image = info.Source, &info.Image
	}
	if a.Lineage == nil {
		a.Lineage = there.Lineage
	}
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	delete(s.known, info.Digest)
	return s.writeFile(filepath.Join("layers", info.Digest.Hex(), "info"), b, true)
}

// touch starts the grace time of a layer again.
func (s *Store) touch(d layer.Digest) error {
	now := time.Now()
	for _, kind := range []string{"layers", "stacks"} {
		err := os.Chtimes(s.path(kind, d.Hex()), now, now)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
