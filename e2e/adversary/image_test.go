package adversary

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// hostileTree is busybox, the program of all techniques, and a layer's own attempts
// in /evil: device nodes, attributes of overlayfs, links that lead out.
func hostileTree(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, body []byte) {
		t.Helper()
		h.Size, h.Format = int64(len(body)), tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
	}
	for name, from := range map[string]string{"bin/busybox": "/bin/busybox", "attack": attack} {
		prog, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		put(tar.Header{Name: name, Mode: 0o755, Typeflag: tar.TypeReg}, prog)
	}
	for _, name := range strings.Fields("sh cat sleep true echo ln mkdir rm mv nc yes ls") {
		put(tar.Header{Name: "bin/" + name, Linkname: "busybox", Typeflag: tar.TypeSymlink}, nil)
	}
	put(tar.Header{Name: "tmp/", Mode: 0o1777, Typeflag: tar.TypeDir}, nil)
	put(tar.Header{Name: "root/", Mode: 0o700, Typeflag: tar.TypeDir}, nil)
	put(tar.Header{Name: "etc/passwd", Mode: 0o644, Typeflag: tar.TypeReg}, []byte("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n"))
	major, minor := disk(t)
	put(tar.Header{Name: "evil/", Mode: 0o755, Typeflag: tar.TypeDir}, nil)
	put(tar.Header{Name: "evil/disk", Mode: 0o666, Typeflag: tar.TypeBlock, Devmajor: major, Devminor: minor}, nil)
	put(tar.Header{Name: "evil/kmsg", Mode: 0o666, Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 11}, nil)
	put(tar.Header{Name: "evil/null", Mode: 0o666, Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, nil)
	put(tar.Header{Name: "evil/shared", Mode: 0o666, Typeflag: tar.TypeReg}, []byte("shared"))
	put(tar.Header{Name: "evil/page", Mode: 0o644, Typeflag: tar.TypeReg}, []byte("shared"))
	put(tar.Header{Name: "evil/out", Linkname: strings.Repeat("../", 40) + "etc/debian_version", Typeflag: tar.TypeSymlink}, nil)
	put(tar.Header{Name: "evil/redirect/", Mode: 0o755, Typeflag: tar.TypeDir, PAXRecords: map[string]string{
		"SCHILY.xattr.trusted.overlay.redirect": "/../../proc", "SCHILY.xattr.user.overlay.redirect": "/../../proc"}}, nil)
	put(tar.Header{Name: "evil/redirect/inside", Mode: 0o644, Typeflag: tar.TypeReg}, nil)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// disk is the number of a block device that this machine's root can open.
func disk(t *testing.T) (major, minor int64) {
	t.Helper()
	all, err := filepath.Glob("/dev/[lvsn]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		var st unix.Stat_t
		if unix.Stat(name, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
			continue
		}
		if f, err := os.Open(name); err == nil {
			_ = f.Close()
			return int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
		}
	}
	t.Fatal("no block device opens, so nothing is proved by one that does not")
	return 0, 0
}
