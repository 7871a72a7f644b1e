package vm

import (
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opendsec/dsec/runtime/microvm/boot"
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

// writeJob writes the part of an initramfs that is a job's own.
func writeJob(w io.Writer, j Job) error {
	a := boot.NewArchive(w)
	for _, d := range []string{"etc", "var", "bin", "sbin"} {
		a.Dir(d)
	}
	a.Text("script", j.Script, 0o755)
	files, err := toolFiles(j.Tools)
	if err != nil {
		return err
	}
	for to, from := range j.Files {
		files[strings.TrimPrefix(to, "/")] = from
	}
	for _, to := range slices.Sorted(maps.Keys(files)) {
		if err := addFile(a, to, files[to]); err != nil {
			return err
		}
	}
	return a.Close()
}

// addFile copies one of this machine; links are followed.
func addFile(a *boot.Archive, name, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	a.File(name, uint32(st.Mode().Perm()), st.Size(), f)
	return nil
}

// toolFiles are programs and the libraries the linker would load for them: path
// in the guest → path here.
func toolFiles(tools []string) (map[string]string, error) {
	files := map[string]string{}
	for _, t := range tools {
		p, err := exec.LookPath(t)
		if err != nil {
			return nil, fmt.Errorf("copy a tool: %w", err)
		}
		files["sbin/"+filepath.Base(t)] = p
		out, err := exec.Command("ldd", p).CombinedOutput()
		if err != nil {
			continue // static
		}
		for f := range strings.FieldsSeq(string(out)) {
			if strings.HasPrefix(f, "/") {
				files[strings.TrimPrefix(f, "/")] = f
			}
		}
	}
	return files, nil
}
