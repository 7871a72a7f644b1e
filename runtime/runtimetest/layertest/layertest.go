// Package layertest makes the layers that tests of tiers run on: of Debian's static busybox,
// and of what a test fills in.
package layertest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

var base struct {
	sync.Once
	dir string
	l   layer.Local
	err error
}

// Base is a layer with Busybox, made once. Who uses it calls Remove at the end.
func Base(t testing.TB) layer.Local {
	t.Helper()
	base.Do(func() {
		if base.dir, base.err = os.MkdirTemp("", "dsec-layertest-"); base.err == nil {
			base.l, base.err = Build(base.dir, Busybox)
		}
	})
	if base.err != nil {
		t.Fatal(base.err)
	}
	return base.l
}

// Use has Base be a layer that another process made: one that is killed would leave its own.
func Use(meta string) {
	base.Do(func() {
		base.l = layer.Local{Info: layer.Info{Digest: "sha256:used"}, Meta: meta, Data: filepath.Join(filepath.Dir(meta), "data")}
	})
}

// Remove removes what Base made.
func Remove() {
	if base.dir != "" {
		_ = os.RemoveAll(base.dir)
	}
}

const applets = `sh cat echo false head id kill mkdir nc printf pwd rm seq setsid sleep tail test true yes ls stat mknod dd env ps
	nproc hostname touch mount umount ln mv chmod chown sync wc grep sed tr dmesg ip ping readlink tty stty cp du chroot od cut sort uname find date`

// Busybox fills a directory with a root of busybox and two users.
func Busybox(dir string) error {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return fmt.Errorf("Debian's busybox-static is needed: %w", err)
	}
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"bin", 0o755}, {"etc", 0o755}, {"tmp", 0o777 | os.ModeSticky}, {"root", 0o700}, {"home", 0o755}, {"home/user", 0o755}, {"proc", 0o755}, {"sys", 0o755}} {
		if err := errors.Join(os.Mkdir(filepath.Join(dir, d.name), 0o755), os.Chmod(filepath.Join(dir, d.name), d.mode)); err != nil {
			return err
		}
	}
	for name, content := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n",
		"etc/group":  "root:x:0:\nuser:x:1000:\nextra:x:1234:user\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/busybox"), busybox, 0o755); err != nil {
		return err
	}
	for _, a := range strings.Fields(applets) {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", a)); err != nil {
			return err
		}
	}
	return os.Chown(filepath.Join(dir, "home/user"), 1000, 1000)
}

// Python adds this machine's python3 to a tree: the program, its libraries, and what it imports.
func Python(dir string) error {
	const script = `set -e; t=$1; mkdir -p $t/usr/bin $t/usr/lib
py=$(readlink -f /usr/bin/python3); v=${py##*/}; cp $py $t/usr/bin/; ln -s $v $t/usr/bin/python3
ldd $py /usr/lib/python3*/lib-dynload/_ctypes*.so | grep -o '/[^ ]*\.so[^ ]*' | grep -v : | sort -u | while read l; do mkdir -p $t${l%/*}; cp -L $l $t$l; done
mkdir -p $t/usr/lib/$v
(cd /usr/lib/$v && tar cf - --exclude=test --exclude=idlelib --exclude=tkinter --exclude=lib2to3 --exclude='config-*' --exclude=pydoc_data .) | tar xf - -C $t/usr/lib/$v`
	if out, err := exec.Command("sh", "-c", script, "sh", dir).CombinedOutput(); err != nil {
		return fmt.Errorf("add Debian's python3: %w: %s", err, out)
	}
	return nil
}

// New is a layer of what fill puts into a directory.
func New(t testing.TB, fill func(dir string) error) layer.Local {
	t.Helper()
	l, err := Build(t.TempDir(), fill)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Build is New in a directory of the caller's, which is made if it is not there.
func Build(tmp string, fill func(dir string) error) (l layer.Local, err error) {
	tree := filepath.Join(tmp, "tree")
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return l, err
	}
	if err := fill(tree); err != nil {
		return l, err
	}
	l = layer.Local{Info: layer.Info{Digest: layer.Digest(fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(tmp))))},
		Meta: filepath.Join(tmp, "meta"), Data: filepath.Join(tmp, "data")}
	if err := convert(tree, &l); err != nil {
		return l, err
	}
	return l, os.RemoveAll(tree)
}

// convert makes the two files of a layer of a tree.
func convert(tree string, l *layer.Local) (err error) {
	var f image.Files
	if f.Meta, err = os.Create(l.Meta); err != nil {
		return err
	}
	defer func() { _ = f.Meta.Close() }()
	if f.Data, err = os.Create(l.Data); err != nil {
		return err
	}
	defer func() { _ = f.Data.Close() }()
	loc, err := image.Locate("dir:" + tree)
	if err == nil {
		_, err = image.Convert(context.Background(), loc, f, image.Options{})
	}
	if err != nil {
		return err
	}
	for _, x := range []struct {
		f    *os.File
		into *int64
	}{{f.Meta, &l.MetaSize}, {f.Data, &l.DataSize}} {
		st, err := x.f.Stat()
		if err != nil {
			return err
		}
		*x.into = st.Size()
	}
	if l.DataSize == 0 {
		l.Data = "" // as a store has it
	}
	return nil
}
