package vm

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// initScript is PID 1 of the guest. The first root file system is mounted over
// itself and entered like another one: the very first cannot be left by
// pivot_root.
const initScript = `#!/bin/busybox sh
if [ "$1" != second ]; then
	/bin/busybox --install -s /bin
	/bin/mount --bind / /root
	cd /root
	/bin/mount --move . /
	exec /bin/chroot . /init second
fi
export PATH=/bin:/sbin HOME=/root TERM=dumb LANG=C.UTF-8
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
ln -s /proc/self/fd /dev/fd
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs tmpfs /run
ip link set lo up
for m in $(cat /modules.order); do insmod /$m || echo "insmod $m: $?" >/dev/ttyS1; done
stty raw -F /dev/ttyS1
sh /script >/dev/ttyS1 2>&1 </dev/null
echo "` + exitMark + `$?" >/dev/ttyS1
sync
poweroff -f
`

// archive writes a cpio of the "newc" kind, which the kernel unpacks as its
// first root file system.
type archive struct {
	w     *bufio.Writer
	at    int64
	inode int
	dirs  map[string]bool
	err   error
}

func (a *archive) entry(name string, mode uint32, size int64, dev [2]uint32, content io.Reader) {
	if a.err != nil {
		return
	}
	a.inode++
	n, err := fmt.Fprintf(a.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.inode, mode, 0, 0, 1, 0, size, 0, 0, dev[0], dev[1], len(name)+1, 0, name)
	a.at += int64(n)
	if err == nil {
		err = a.pad()
	}
	if err == nil && content != nil {
		var m int64
		m, err = io.CopyN(a.w, content, size)
		a.at += m
		if err == nil {
			err = a.pad()
		}
	}
	if err != nil {
		a.err = fmt.Errorf("archive %s: %w", name, err)
	}
}

func (a *archive) pad() error {
	n := -a.at & 3
	a.at += n
	_, err := a.w.Write(make([]byte, n))
	return err
}

// dir makes a directory and those above it, once.
func (a *archive) dir(name string) {
	if name == "." || name == "/" || a.dirs[name] {
		return
	}
	a.dir(path.Dir(name))
	a.dirs[name] = true
	a.entry(name, 0o040755, 0, [2]uint32{}, nil)
}

func (a *archive) text(name, content string, mode uint32) {
	a.dir(path.Dir(name))
	a.entry(name, 0o100000|mode, int64(len(content)), [2]uint32{}, strings.NewReader(content))
}

// file copies one of this machine; links are followed.
func (a *archive) file(name, from string) {
	if a.err != nil {
		return
	}
	f, err := os.Open(from)
	if err != nil {
		a.err = err
		return
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		a.err = err
		return
	}
	a.dir(path.Dir(name))
	a.entry(name, 0o100000|uint32(st.Mode().Perm()), st.Size(), [2]uint32{}, f)
}

func (k Kernel) writeInitrd(file string, j Job) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	a := &archive{w: bufio.NewWriterSize(f, 1<<20), dirs: map[string]bool{}}
	for _, d := range []string{"dev", "proc", "sys", "tmp", "run", "root", "etc", "mnt", "var", "sbin"} {
		a.dir(d)
	}
	a.entry("dev/console", 0o020600, 0, [2]uint32{5, 1}, nil) // PID 1's, before it mounts /dev
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("make initramfs: %w (package busybox-static)", err)
	}
	a.file("bin/busybox", busybox)
	a.text("init", initScript, 0o755)
	a.text("script", j.Script, 0o755)
	a.text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n", 0o644)
	a.text("etc/group", "root:x:0:\nnogroup:x:65534:\n", 0o644)
	if err := k.addModules(a, j.Modules); err != nil {
		return err
	}
	if err := addTools(a, j.Tools); err != nil {
		return err
	}
	for to, from := range j.Files {
		a.file(strings.TrimPrefix(to, "/"), from)
	}
	a.entry("TRAILER!!!", 0, 0, [2]uint32{}, nil)
	if a.err == nil {
		a.err = a.w.Flush()
	}
	return a.err
}

func (k Kernel) addModules(a *archive, names []string) error {
	order, err := k.closure(append([]string{"virtio_pci", "virtio_blk"}, names...))
	if err != nil {
		return err
	}
	for _, f := range order {
		a.file("modules/"+f, filepath.Join(k.modules, f))
	}
	var list strings.Builder
	for _, f := range order {
		fmt.Fprintf(&list, "modules/%s\n", f)
	}
	a.text("modules.order", list.String(), 0o644)
	return nil
}

// addTools copies programs and the libraries the linker would load for them.
func addTools(a *archive, tools []string) error {
	var all []string
	for _, t := range tools {
		p, err := exec.LookPath(t)
		if err != nil {
			return fmt.Errorf("copy a tool: %w", err)
		}
		a.file("sbin/"+filepath.Base(t), p)
		out, err := exec.Command("ldd", p).CombinedOutput()
		if err != nil {
			continue // static
		}
		for f := range strings.FieldsSeq(string(out)) {
			if strings.HasPrefix(f, "/") {
				all = append(all, f)
			}
		}
	}
	slices.Sort(all)
	for _, lib := range slices.Compact(all) {
		a.file(strings.TrimPrefix(lib, "/"), lib)
	}
	return nil
}
