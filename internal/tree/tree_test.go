package tree

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// describe is everything Copy promises to keep, by path.
func describe(t *testing.T, p Place) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, Walk(p, func(q Place, at string, st *unix.Stat_t) error {
		s := fmt.Sprintf("%o %d:%d %d.%09d rdev %d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, st.Rdev)
		full := filepath.Join(p.Dir.Name(), at)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(full)
			must(t, err)
			s += fmt.Sprintf(" size %d nlink %d %x", st.Size, st.Nlink, b[:min(len(b), 64)])
		case unix.S_IFLNK:
			to, err := os.Readlink(full)
			must(t, err)
			s += " -> " + to
		}
		f, err := openAt(q, unix.O_PATH)
		must(t, err)
		defer f.Close()
		names, err := list(procPath(f))
		must(t, err)
		slices.Sort(names)
		for _, n := range names {
			v, err := get(procPath(f), n)
			must(t, err)
			s += fmt.Sprintf(" %s=%x", n, v)
		}
		out[strings.TrimPrefix(at, p.Name)] = s
		return nil
	}))
	return out
}

func TestACopyIsLikeWhatItIsOf(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("owners and devices need root and this test runs without it")
	}
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, "from", n) }
	must(t, os.MkdirAll(at("sub/deep"), 0o755))
	must(t, os.WriteFile(at("a"), []byte("text"), 0o640))
	must(t, os.Link(at("a"), at("sub/b")))
	must(t, os.Symlink("../nowhere", at("sub/link")))
	must(t, unix.Mkfifo(at("fifo"), 0o600))
	must(t, unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.WriteFile(at("setuid"), nil, 0o755))
	must(t, os.Chown(at("setuid"), 1234, 2345))
	must(t, os.Chmod(at("setuid"), 0o755|os.ModeSetuid))
	f, err := os.Create(at("sparse"))
	must(t, err)
	_, err = f.WriteAt([]byte("end"), 64<<20)
	must(t, errors.Join(err, f.Close()))
	if err := unix.Setxattr(at("a"), "user.note", []byte("kept"), 0); err != nil {
		t.Logf("without attributes of users: %v", err)
	}
	must(t, unix.Lsetxattr(at("sub/link"), "trusted.note", []byte("of a link"), 0))
	must(t, os.Chmod(at("sub/deep"), 0o1511))
	old := []unix.Timespec{{Sec: 1, Nsec: 2}, {Sec: 3, Nsec: 4}}
	for _, n := range []string{"a", "sub/link", "sub/deep", "sub", "."} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, at(n), old, unix.AT_SYMLINK_NOFOLLOW))
	}
	d := open(t, dir)
	from, to := Place{d, "from"}, Place{d, "to"}
	must(t, Copy(from, to))
	if was, is := describe(t, from), describe(t, to); !maps.Equal(was, is) {
		for k, v := range was {
			if is[k] != v {
				t.Errorf("%s\n was %s\n  is %s", k, v, is[k])
			}
		}
	}
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Join(dir, "to/sparse"), &st))
	if st.Blocks > 1024 {
		t.Errorf("a sparse file has %d blocks", st.Blocks)
	}
	must(t, Remove(to))
	must(t, Remove(to))
	if _, err := to.Lstat(); !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
}

func TestNamesElsewhereAreFoundAndParted(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "p/in"), 0o755))
	must(t, os.Mkdir(filepath.Join(dir, "pq"), 0o755))
	w := func(n string) string { return filepath.Join(dir, n) }
	must(t, os.WriteFile(w("p/in/f"), []byte("x"), 0o600))
	must(t, os.Link(w("p/in/f"), w("p/g")))
	must(t, os.Link(w("p/in/f"), w("pq/out")))
	must(t, os.WriteFile(w("p/both"), []byte("y"), 0o600))
	must(t, os.Link(w("p/both"), w("p/in/both")))
	d := open(t, dir)
	p := Place{d, "p"}
	others, err := Names(d, p)
	must(t, err)
	if len(others) != 1 || fmt.Sprint(slices.Collect(maps.Values(others))) != "[[pq/out]]" {
		t.Fatalf("%v", others)
	}
	must(t, Part(p))
	must(t, os.WriteFile(w("pq/out"), []byte("changed"), 0o600))
	f, _ := os.ReadFile(w("p/in/f"))
	g, _ := os.ReadFile(w("p/g"))
	if string(f) != "x" || string(g) != "x" {
		t.Errorf("%q %q", f, g)
	}
	must(t, os.WriteFile(w("p/g"), []byte("z"), 0o600))
	if f, _ = os.ReadFile(w("p/in/f")); string(f) != "z" {
		t.Error("the two names below are not one file any more")
	}
	if others, err = Names(d, p); err != nil || len(others) != 0 {
		t.Error(others, err)
	}
}

func TestLinksAreNotFollowed(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "outside"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "outside/kept"), nil, 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "p"), 0o755))
	must(t, os.Symlink("../outside", filepath.Join(dir, "p/link")))
	must(t, Remove(Place{open(t, dir), "p"}))
	if _, err := os.Stat(filepath.Join(dir, "outside/kept")); err != nil {
		t.Error(err)
	}
}

// fewFiles leaves this process so many descriptors more than it has.
func fewFiles(t *testing.T, more int) {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	var was unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(len(open) + more), Max: was.Max}))
	t.Cleanup(func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)) })
}

// TestManyLinksTakeNoDescriptors: how many there are is up to who made them.
func TestManyLinksTakeNoDescriptors(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "p/in"), 0o755))
	for i := range 300 {
		f := filepath.Join(dir, "p", fmt.Sprint(i))
		must(t, os.WriteFile(f, nil, 0o600))
		must(t, os.Link(f, filepath.Join(dir, "p/in", fmt.Sprint(i))))
	}
	for i := range 300 {
		must(t, os.Link(filepath.Join(dir, "p/in", "0"), filepath.Join(dir, "p/in", fmt.Sprint("also", i))))
	}
	must(t, os.Link(filepath.Join(dir, "p/0"), filepath.Join(dir, "elsewhere")))
	d := open(t, dir)
	fewFiles(t, 40)
	must(t, Copy(Place{d, "p"}, Place{d, "q"}))
	must(t, Part(Place{d, "p"}))
	var st unix.Stat_t
	for name, links := range map[string]uint64{"q/299": 2, "q/in/also299": 302, "p/in/also299": 302, "elsewhere": 1} {
		if must(t, unix.Stat(filepath.Join(dir, name), &st)); uint64(st.Nlink) != links {
			t.Errorf("%s has %d names, want %d", name, st.Nlink, links)
		}
	}
}

// deep makes directories, one in the other, and opens the last one.
func deep(t *testing.T, at Place, levels, length int) *os.File {
	t.Helper()
	name := strings.Repeat("d", length)
	must(t, unix.Mkdirat(at.fd(), at.Name, 0o700))
	dir, err := openDir(at)
	for range levels {
		must(t, err)
		must(t, unix.Mkdirat(int(dir.Fd()), name, 0o700))
		next, nerr := openDir(Place{dir, name})
		dir.Close()
		dir, err = next, nerr
	}
	must(t, err)
	t.Cleanup(func() { dir.Close() })
	return dir
}

// TestLongPathsAreNoWayOut: names beyond what the kernel takes at once are found,
// copied and parted like others.
func TestLongPathsAreNoWayOut(t *testing.T) {
	d := open(t, t.TempDir())
	last := deep(t, Place{d, "p"}, 40, 250)
	must(t, unix.Mknodat(int(last.Fd()), "a", unix.S_IFREG|0o600, 0))
	must(t, unix.Linkat(int(last.Fd()), "a", int(last.Fd()), "b", 0))
	must(t, unix.Linkat(int(last.Fd()), "a", int(d.Fd()), "c", 0))
	must(t, Copy(Place{d, "p"}, Place{d, "q"}))
	others, err := Names(d, Place{d, "c"})
	must(t, err)
	if len(others["c"]) != 2 {
		t.Errorf("%d other names, want 2", len(others["c"]))
	}
	must(t, Part(Place{d, "p"}))
	for at, links := range map[Place]uint64{{d, "c"}: 1, {last, "a"}: 2, {last, "b"}: 2} {
		if st, err := at.Lstat(); err != nil || uint64(st.Nlink) != links {
			t.Errorf("%s has %d names, want %d: %v", at.Name, st.Nlink, links, err)
		}
	}
}

// TestNamesTakeBoundedMemory: with a few links in a deep directory they would take
// gigabytes.
func TestNamesTakeBoundedMemory(t *testing.T) {
	d := open(t, t.TempDir())
	last := deep(t, Place{d, "p"}, maxDepth-8, 255)
	must(t, unix.Mknodat(int(last.Fd()), "a", unix.S_IFREG|0o600, 0))
	must(t, unix.Linkat(int(last.Fd()), "a", int(d.Fd()), "c", 0))
	for i := range maxNames/(255*maxDepth) + 8 {
		must(t, unix.Linkat(int(last.Fd()), "a", int(last.Fd()), fmt.Sprint(i), 0))
	}
	if _, err := Names(d, Place{d, "c"}); !errors.Is(err, unix.EMLINK) {
		t.Errorf("names: %v", err)
	}
	if err := Part(Place{d, "p"}); !errors.Is(err, unix.EMLINK) {
		t.Errorf("part: %v", err)
	}
	must(t, Remove(Place{d, "p"}))
}

// TestTheDeepestCopyCanBeRemoved, with the directory it was made in.
func TestTheDeepestCopyCanBeRemoved(t *testing.T) {
	d := open(t, t.TempDir())
	deep(t, Place{d, "p"}, maxDepth-1, 1)
	must(t, unix.Mkdirat(int(d.Fd()), "shelf", 0o700))
	in, err := openDir(Place{d, "shelf"})
	must(t, err)
	defer in.Close()
	must(t, Copy(Place{d, "p"}, Place{in, "p"}))
	must(t, Remove(Place{d, "shelf"}))
	must(t, Remove(Place{d, "p"}))
}
