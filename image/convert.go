package image

import (
	"context"
	"errors"
	"os"
	"path"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/within"
)

// Owner replaces the owner of everything in a layer.
type Owner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// Options say what to make of a source. The zero value of a limit is its default.
type Options struct {
	At    string `json:"at,omitempty"`    // directory in the layer under which everything goes
	Owner *Owner `json:"owner,omitempty"` // nil: as in the source
	// KeepWhiteouts makes a layer that stands on others: whiteouts become
	// what overlayfs understands instead of being applied.
	KeepWhiteouts bool `json:"keep_whiteouts,omitempty"`
	UserXattr     bool `json:"user_xattr,omitempty"` // opaque directories for mounts with userxattr
	// Loose makes a layer of one OCI layer without those below it: what they
	// decide is marked, for Below.Settle. It implies KeepWhiteouts.
	Loose bool `json:"loose,omitempty"`

	MaxBytes   int64 `json:"max_bytes,omitempty"`   // of contents; default 256 GiB
	MaxEntries int64 `json:"max_entries,omitempty"` // default 8 Mi
	MaxRatio   int64 `json:"max_ratio,omitempty"`   // decompressed to compressed, beyond the first 64 MiB; default 200

	Platform string `json:"platform,omitempty"` // "linux/arm64"; default that of this program
	Insecure bool   `json:"insecure,omitempty"` // plain HTTP to registries that are not on this machine
	// Mirrors maps a registry, or "*", to those asked before it, in order.
	Mirrors map[string][]string `json:"mirrors,omitempty"`
	// Credentials maps a registry to what it wants; see FindCredentials.
	Credentials map[string]Credentials `json:"credentials,omitempty"`

	// Progress is called now and then with what has been read so far.
	Progress func(Progress) `json:"-"`
}

// Progress of a conversion.
type Progress struct {
	Bytes   int64 `json:"bytes"` // contents written
	Entries int64 `json:"entries"`
}

// Files are the descriptors a conversion works on. Meta and Data must be empty,
// and are neither synced nor closed.
type Files struct {
	Meta    *os.File
	Data    *os.File
	Scratch *os.File // for a compressed archive, which must be read twice; may be nil
	// What the caller has opened of the source, because who converts may not.
	Input  *os.File // of KindFile
	Layout *os.Root // of KindLayout
}

// Result describes what was written.
type Result struct {
	MetaSize int64   `json:"meta_size"`
	DataSize int64   `json:"data_size"` // a multiple of erofs.BlockSize
	Entries  int64   `json:"entries"`   // inodes
	Config   *Config `json:"config,omitempty"`
}

// Convert makes one layer of a source: everything the source holds, its own
// layers applied in order. A source that is not what it claims to be is
// Invalid or Corrupt; a full disk is NoSpace. On error the files hold nothing
// of value.
func Convert(ctx context.Context, source Location, dst Files, opts Options) (Result, error) {
	const op = "convert image"
	if err := opts.fill(); err != nil {
		return Result{}, dsec.E(dsec.Invalid, op, source.Source, err)
	}
	src, err := open(ctx, source, dst, opts)
	if err != nil {
		return Result{}, classify(op, source.Source, err)
	}
	defer src.close()
	res, err := convert(ctx, src, dst, opts)
	if err != nil {
		return Result{}, classify(op, source.Source, err)
	}
	return res, nil
}

func convert(ctx context.Context, src *opened, dst Files, opts Options) (Result, error) {
	data := erofs.NewData(dst.Data)
	m := newMerger(data, opts)
	for _, l := range src.layers {
		if err := patiently(ctx, func() error { return m.layer(ctx, l) }); err != nil {
			return Result{}, err
		}
	}
	if err := m.finish(); err != nil {
		return Result{}, err
	}
	blocks, err := erofs.Compact(dst.Data, m.root)
	if err != nil {
		return Result{}, err
	}
	stats, err := erofs.Write(dst.Meta, m.root, blocks)
	if err != nil {
		return Result{}, err
	}
	return Result{MetaSize: stats.MetaSize, DataSize: int64(blocks) * erofs.BlockSize, Entries: stats.Inodes, Config: src.config}, nil
}

// patiently runs a step again, a few times and after a while, if all that was
// wrong is that something was away.
func patiently(ctx context.Context, step func() error) error {
	for wait := time.Second; ; wait *= 3 {
		err := step()
		if dsec.ClassOf(err) != dsec.Unavailable || wait > 10*time.Second {
			return err
		}
		if ended := within.Sleep(ctx, wait); ended != nil {
			return errors.Join(ended, err)
		}
	}
}

func (o *Options) fill() error {
	at, err := cleanName(o.At)
	if err != nil {
		return err
	}
	if strings.HasPrefix(path.Base(at), whiteoutPrefix) {
		return errors.New("at: a reserved name")
	}
	o.At = at
	o.KeepWhiteouts = o.KeepWhiteouts || o.Loose
	for _, l := range []struct {
		v   *int64
		def int64
	}{{&o.MaxBytes, 256 << 30}, {&o.MaxEntries, 8 << 20}, {&o.MaxRatio, 200}} {
		if *l.v <= 0 {
			*l.v = l.def
		}
	}
	return nil
}

func (o *Options) report(bytes, entries int64) {
	if o.Progress != nil {
		o.Progress(Progress{Bytes: bytes, Entries: entries})
	}
}

// classify gives an error its class, unless it has one: what is not the fault of
// this machine is the source's, which is not what it should be.
func classify(op, object string, err error) error {
	return dsec.E(fault.Class(err, dsec.Invalid), op, object, err)
}
