package bench

import (
	"archive/tar"
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	dsecruntime "github.com/opendsec/dsec/runtime"
)

// Saved is one way to save a disk, one time.
type Saved struct {
	What  string        `json:"what"` // disk
	How   string        `json:"how"`
	Took  time.Duration `json:"took"`
	Pause time.Duration `json:"pause"` // for which the sandbox stood still
	Bytes int64         `json:"bytes"` // written
}

// Saver saves the disk of a sandbox.
type Saver struct {
	How  string
	Save func(ctx context.Context, id dsec.SandboxID) (pause time.Duration, bytes int64, err error)
}

// Save runs each saver on a running sandbox, in turn, rounds times.
func Save(ctx context.Context, what string, id dsec.SandboxID, savers []Saver, rounds int) (all []Saved, err error) {
	for range rounds {
		for _, s := range savers {
			begin := time.Now()
			pause, n, err := s.Save(ctx, id)
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", what, s.How, err)
			}
			all = append(all, Saved{What: what, How: s.How, Took: time.Since(begin), Pause: pause, Bytes: n})
		}
	}
	return all, nil
}

// SavedTable prints medians, and how many times the first way of each disk the
// others took.
func SavedTable(w io.Writer, all []Saved) {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "disk\tsaved by\ttime\tstood still\twritten\ttime ×\tstill ×\twritten ×")
	for _, what := range distinct(all, func(s Saved) string { return s.What }) {
		rows := slices.DeleteFunc(slices.Clone(all), func(s Saved) bool { return s.What != what })
		var first Saved
		for i, how := range distinct(rows, func(s Saved) string { return s.How }) {
			m := medianOf(slices.DeleteFunc(slices.Clone(rows), func(s Saved) bool { return s.How != how }))
			if i == 0 {
				first = m
			}
			fmt.Fprintf(t, "%s\t%s\t%v\t%v\t%.1f MiB\t%.2f\t%.1f\t%.2f\n", what, how, m.Took.Round(time.Millisecond), m.Pause.Round(100*time.Microsecond),
				float64(m.Bytes)/(1<<20), ratio(m.Took, first.Took), ratio(m.Pause, first.Pause), float64(m.Bytes)/float64(max(first.Bytes, 1)))
		}
	}
	_ = t.Flush() // as the other tables: a closed stdout is nobody's loss
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(max(b, 1)) }

func distinct(all []Saved, key func(Saved) string) (keys []string) {
	for _, s := range all {
		if k := key(s); !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
	}
	return keys
}

func medianOf(all []Saved) Saved {
	m := all[0]
	pick := func(value func(Saved) int64) int64 {
		slices.SortFunc(all, func(a, b Saved) int { return cmp.Compare(value(a), value(b)) })
		return value(all[len(all)/2])
	}
	m.Took = time.Duration(pick(func(s Saved) int64 { return int64(s.Took) }))
	m.Pause = time.Duration(pick(func(s Saved) int64 { return int64(s.Pause) }))
	m.Bytes = pick(func(s Saved) int64 { return s.Bytes })
	return m
}

// FillFiles puts so many files of so many bytes in all into a sandbox, from
// outside, a hundred to a directory. What is in them does not compress.
func FillFiles(ctx context.Context, rt dsecruntime.Runtime, id dsec.SandboxID, dir string, count int, bytes int64) error {
	f, ok := rt.(dsecruntime.Filer)
	if !ok {
		return dsec.Errorf(dsec.Unsupported, "fill sandbox", string(id), "the tier has no files")
	}
	fs, err := f.Files(ctx, id, "0")
	if err != nil {
		return err
	}
	if err := fs.Mkdir(ctx, dir, 0o755, true); err != nil {
		return err
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(TreeTar(w, count, bytes)) }()
	defer r.Close()
	return fs.Upload(ctx, dir, r, files.TreeOptions{})
}

// TreeTar writes such files as a tar.
func TreeTar(w io.Writer, count int, bytes int64) error {
	r, t := rand.NewChaCha8([32]byte{1}), tar.NewWriter(w)
	each := bytes / int64(count)
	for i := range count {
		if i%100 == 0 {
			if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprintf("d%04d/", i/100), Mode: 0o755}); err != nil {
				return err
			}
		}
		if err := t.WriteHeader(&tar.Header{Name: fmt.Sprintf("d%04d/f%06d", i/100, i), Size: each, Mode: 0o644, ModTime: time.Unix(1e9, 0)}); err != nil {
			return err
		}
		if _, err := io.CopyN(t, r, each); err != nil {
			return err
		}
	}
	return t.Close()
}

// GNUTar saves a directory with tar, as completely as it can, into a new file
// in dir. The sandbox stands still meanwhile.
func GNUTar(ctx context.Context, rt dsecruntime.Runtime, id dsec.SandboxID, tree *os.File, dir string) (pause time.Duration, bytes int64, err error) {
	p, ok := rt.(dsecruntime.Pauser)
	r, ok2 := rt.(dsecruntime.Resumer)
	if !ok || !ok2 {
		return 0, 0, dsec.Errorf(dsec.Unsupported, "save disk", string(id), "the tier cannot pause")
	}
	out, err := os.CreateTemp(dir, "*.tar")
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = out.Close(); _ = os.Remove(out.Name()) }()
	begin := time.Now()
	if err := p.Pause(ctx, id); err != nil {
		return 0, 0, err
	}
	cmd := exec.CommandContext(ctx, "tar", "--create", "--sparse", "--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner", "--directory=/proc/self/fd/3", ".")
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []*os.File{tree}, out, os.Stderr
	err = cmd.Run()
	if rerr := r.Resume(context.WithoutCancel(ctx), id); err == nil {
		err = rerr
	}
	pause = time.Since(begin)
	if err != nil {
		return pause, 0, err
	}
	if err := out.Sync(); err != nil {
		return pause, 0, err
	}
	st, err := out.Stat()
	if err != nil {
		return pause, 0, err
	}
	return pause, st.Size(), nil
}
