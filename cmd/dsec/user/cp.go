package user

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
)

// copied is what cp prints as JSON.
type copied struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Bytes int64  `json:"bytes"`
}

// CP is the verb that copies files and trees in and out.
func CP() *cobra.Command {
	k := copying{}
	c := &cobra.Command{
		Use:   "cp SOURCE TARGET",
		Short: "Copy a file or tree into or out of a sandbox",
		Long: `One side is SANDBOX:PATH, with an absolute PATH, the other a path here; "-" is stdin or
stdout. As with cp, a target that is a directory gets the source inside it. Links,
modes, times, sparse files and extended attributes stay; what is copied in belongs to
the sandbox's user, or --user, unless --archive keeps the owners. What is copied out
loses what would give rights here: setuid and setgid bits, file capabilities, devices.
Missing directories of the target inside a sandbox are made.`,
		Example:           "  dsec cp patch.diff work:/src/\n  dsec cp work:/src/report ./out\n  dsec cp work:/var/log/app.log - | tail",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: completeCopy,
		RunE: func(c *cobra.Command, args []string) error {
			k.c = c
			return with(c, func(ctx context.Context, cl *client.Client) error { return k.run(ctx, cl, args[0], args[1]) })
		},
	}
	c.Flags().StringVarP(&k.user, "user", "u", "", "reach files as this user (default: the sandbox's)")
	c.Flags().BoolVarP(&k.archive, "archive", "a", false, "keep owners by number")
	return c
}

// completeCopy offers "SANDBOX:" besides local files.
func completeCopy(c *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 1 || strings.ContainsAny(word, "/.") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return sandboxNames(c, ":"), cobra.ShellCompDirectiveNoSpace
}

// copying is one call of cp.
type copying struct {
	c       *cobra.Command
	user    string
	archive bool
	remote  *client.Files
}

// side splits SANDBOX:PATH. A path here that holds a colon starts with "./"
// or "/".
func side(arg string) (sandbox, p string) {
	name, rest, ok := strings.Cut(arg, ":")
	if !ok || name == "" || strings.ContainsAny(name, "/.") {
		return "", arg
	}
	return name, rest
}

func (k *copying) run(ctx context.Context, cl *client.Client, from, to string) error {
	fromBox, fromPath := side(from)
	toBox, toPath := side(to)
	if (fromBox == "") == (toBox == "") {
		return usage("copy", "one of SOURCE and TARGET must be SANDBOX:PATH")
	}
	id, err := find(ctx, cl, fromBox+toBox)
	if err != nil {
		return err
	}
	k.remote = cl.Files(id, k.user)
	b := newBar(k.c, "copy", 0, size)
	defer b.done()
	if toBox != "" {
		err = k.in(ctx, fromPath, toPath, b)
	} else {
		err = k.out(ctx, fromPath, toPath, b)
	}
	if err != nil || fromPath == "-" || toPath == "-" {
		return err
	}
	return show(k.c, copied{from, to, b.n}, func(io.Writer) error { return nil })
}

// in copies from here into the sandbox.
func (k *copying) in(ctx context.Context, from, to string, b *bar) error {
	if from == "-" {
		_, err := k.remote.Write(ctx, to, counting{r: k.c.InOrStdin(), b: b}, files.WriteOptions{Parents: true})
		return err
	}
	st, err := os.Stat(from)
	if err != nil {
		return hostError("read", from, err)
	}
	to, err = k.inside(ctx, to, filepath.Base(absolute(from)))
	if err != nil {
		return err
	}
	if st.IsDir() {
		return k.treeIn(ctx, from, to, b)
	}
	f, err := os.Open(from)
	if err != nil {
		return hostError("read", from, err)
	}
	defer f.Close()
	if !st.Mode().IsRegular() {
		return hostError("read", from, fmt.Errorf("not a regular file"))
	}
	b.set(0, st.Size())
	mode := uint32(st.Mode().Perm())
	i, err := k.remote.Write(ctx, to, counting{r: f, b: b}, files.WriteOptions{Parents: true, Mode: &mode})
	if err != nil {
		return err
	}
	when := st.ModTime()
	a := files.Attr{MTime: &when}
	if k.archive {
		a.UID, a.GID = ownerOf(st)
		a.Mode = &mode
	}
	return k.remote.SetAttr(ctx, i.Path, a)
}

// inside returns where a source of this name goes: into a directory, else to
// the path itself.
func (k *copying) inside(ctx context.Context, to, name string) (string, error) {
	i, err := k.remote.Stat(ctx, to, true)
	switch {
	case err == nil && i.Kind == files.Dir, err != nil && strings.HasSuffix(to, "/"):
		if name == "/" || name == "." {
			return to, nil
		}
		return path.Join(to, name), nil
	case err != nil && dsec.ClassOf(err) != dsec.FileNotFound:
		return "", err
	}
	return to, nil
}

func (k *copying) treeIn(ctx context.Context, from, to string, b *bar) error {
	l, err := files.NewLocal(from)
	if err != nil {
		return err
	}
	defer l.Close()
	var o files.TreeOptions
	if !k.archive {
		if o.UID, o.GID, err = k.identity(ctx, to); err != nil {
			return err
		}
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := l.Download(ctx, "/", w, files.TreeOptions{})
		w.CloseWithError(err)
		packed <- err
	}()
	err = k.remote.Upload(ctx, to, counting{r: r, b: b}, o)
	r.CloseWithError(io.ErrClosedPipe)
	return pipeError(<-packed, err)
}

// pipeError is the error that came first of who writes into a pipe and who reads
// from it: a reader that broke off is all that its writer's error says.
func pipeError(write, read error) error {
	if read == nil || write != nil && dsec.ClassOf(write) != dsec.Canceled && !errors.Is(write, io.ErrClosedPipe) {
		return write
	}
	return read
}

// identity finds the numbers of the user that files are written as, from a file
// that is made and removed.
func (k *copying) identity(ctx context.Context, dir string) (uid, gid *uint32, err error) {
	probe := path.Join(dir, ".dsec-cp-"+dsec.Random(12))
	i, err := k.remote.Write(ctx, probe, strings.NewReader(""), files.WriteOptions{Parents: true})
	if err != nil {
		return nil, nil, err
	}
	return &i.UID, &i.GID, k.remote.Remove(ctx, probe, false)
}

// out copies from the sandbox to here.
func (k *copying) out(ctx context.Context, from, to string, b *bar) error {
	i, err := k.remote.Stat(ctx, from, true)
	if err != nil {
		return err
	}
	if to == "-" {
		_, err := k.remote.Read(ctx, from, 0, -1, counting{w: k.c.OutOrStdout(), b: b})
		return err
	}
	if st, err := os.Stat(to); err == nil && st.IsDir() && path.Base(from) != "/" {
		to = filepath.Join(to, path.Base(path.Clean(from)))
	}
	if i.Kind == files.Dir {
		return k.treeOut(ctx, from, to, b)
	}
	dir, err := files.NewLocal(filepath.Dir(absolute(to)))
	if err != nil {
		return err
	}
	defer dir.Close()
	b.set(0, i.Size)
	mode := i.Mode & 0o777
	r, w := io.Pipe()
	read := make(chan error, 1)
	go func() {
		_, err := k.remote.Read(ctx, from, 0, -1, w)
		w.CloseWithError(err)
		read <- err
	}()
	name := "/" + filepath.Base(absolute(to))
	_, err = dir.Write(ctx, name, counting{r: r, b: b}, files.WriteOptions{Mode: &mode})
	r.CloseWithError(io.ErrClosedPipe)
	if err := pipeError(<-read, err); err != nil {
		return err
	}
	return dir.SetAttr(ctx, name, files.Attr{MTime: &i.MTime})
}

// treeOut unpacks a tree here, where no name of it can leave the target.
func (k *copying) treeOut(ctx context.Context, from, to string, b *bar) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return hostError("make directory", to, err)
	}
	l, err := files.NewLocal(to)
	if err != nil {
		return err
	}
	defer l.Close()
	var o files.TreeOptions
	if !k.archive {
		uid, gid := uint32(os.Geteuid()), uint32(os.Getegid()) //nolint:gosec // ids have 32 bits
		o.UID, o.GID = &uid, &gid
	}
	r, w := io.Pipe()
	read := make(chan error, 1)
	go func() {
		err := k.remote.Download(ctx, from, w, files.TreeOptions{})
		w.CloseWithError(err)
		read <- err
	}()
	err = l.Receive(ctx, "/", counting{r: r, b: b}, o)
	r.CloseWithError(io.ErrClosedPipe)
	return pipeError(<-read, err)
}
