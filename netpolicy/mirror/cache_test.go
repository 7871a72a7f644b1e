package mirror

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
)

// TestWhoAsksAtOneTimeAsksOnce: of an index, and of a file, which all get as it comes.
func TestWhoAsksAtOneTimeAsksOnce(t *testing.T) {
	w := newWorld(t)
	name := "demo-1.0-py3-none-any.whl"
	wheels := w.up.pypi(t, "demo", release{"1.0", before})
	at := "/packages/" + sum256(wheels[name]) + "/" + name
	in, out := make(chan bool, 1), make(chan bool)
	w.up.set(at, func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Length", fmt.Sprint(len(wheels[name])))
		_, _ = rw.Write(wheels[name][:10])
		rw.(http.Flusher).Flush()
		in <- true
		<-out
		_, _ = rw.Write(wheels[name][10:])
	})
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			head := "A: b"
			if i%3 == 0 {
				head = "Range: bytes=0-"
			}
			if a := w.get("pypi", "/files/demo/"+name, head); a.err != nil || a.status/100 != 2 || a.body != string(wheels[name]) {
				t.Errorf("status %d, %d bytes, %v", a.status, len(a.body), a.err)
			}
		})
	}
	<-in
	close(out)
	all.Wait()
	if n, k := w.up.times(at), w.up.times("/simple/demo/"); n != 1 || k != 1 {
		t.Errorf("upstream was asked %d times for the file, %d times for the index", n, k)
	}
	if s := w.m.Stats(); s.Requests != 20 || s.Misses < 2 || s.CacheSize == 0 {
		t.Errorf("%+v", s)
	}
}

// age makes all indexes old, as upstream saying nothing for so long does.
func (w *world) age(d time.Duration) {
	w.t.Helper()
	names, err := filepath.Glob(filepath.Join(w.m.c.Dir, "*"))
	if err != nil || len(names) == 0 {
		w.t.Fatal("nothing is kept", err)
	}
	then := time.Now().Add(-d)
	for _, n := range names {
		if err := os.Chtimes(n, then, then); err != nil {
			w.t.Fatal(err)
		}
	}
}

// TestIndexesAreRenewed by their ETag when they are not fresh, and served for some
// time when upstream is away, which is said.
func TestIndexesAreRenewed(t *testing.T) {
	w := newWorld(t)
	w.up.pypi(t, "demo", release{"1.0", before})
	ask := func() answer { return w.get("pypi", "/simple/demo/") }
	ask().want(t, 200)
	w.age(9 * time.Minute)
	ask().want(t, 200)
	if n := w.up.times("/simple/demo/"); n != 1 {
		t.Errorf("asked %d times while fresh", n)
	}
	w.age(11 * time.Minute)
	ask().want(t, 200)
	ask().want(t, 200)
	if n := w.up.times("/simple/demo/"); n != 2 || w.up.heads[1].Get("If-None-Match") == "" {
		t.Errorf("asked %d times, then with %v", n, w.up.heads[1])
	}
	w.up.pypi(t, "demo", release{"1.0", before}, release{"1.1", before})
	w.age(11 * time.Minute)
	ask().want(t, 200, "demo-1.1")
	w.up.replace(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusServiceUnavailable) })
	w.age(6 * 24 * time.Hour)
	if a := ask().want(t, 200, "demo-1.1"); !strings.HasPrefix(a.header.Get("Warning"), "110 ") {
		t.Errorf("no warning: %v", a.header)
	}
	w.age(8 * 24 * time.Hour)
	ask().want(t, 502, "503")
	w.up.replace(http.NotFound) // upstream is there, and has none
	w.age(time.Hour)
	ask().want(t, 404)
}

// TestTheCacheOutlivesTheProcess, and what was damaged meanwhile is fetched again.
func TestTheCacheOutlivesTheProcess(t *testing.T) {
	name := "demo-1.0-py3-none-any.whl"
	for what, damage := range map[string]func(path string) error{
		"nothing": func(string) error { return nil },
		"a bit":   func(p string) error { return change(p, 0) },
		"the end": func(p string) error { return os.Truncate(p, 100) },
		"all":     func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"gone":    os.Remove,
		"a link":  func(p string) error { return os.Rename(p, p+".x") },
	} {
		w := newWorld(t)
		wheels := w.up.pypi(t, "demo", release{"1.0", before})
		w.get("pypi", "/files/demo/"+name).want(t, 200)
		c := w.m.c
		w.close()
		path := filepath.Join(c.Dir, nameOf("file sha256:"+sum256(wheels[name])))
		if err := damage(path); err != nil {
			t.Fatal(err)
		}
		if what == "a link" {
			if err := os.Symlink(path+".x", path); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(c.Dir, tempPrefix+"left"), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.open(c)
		if a := w.get("pypi", "/files/demo/"+name).want(t, 200); a.body != string(wheels[name]) {
			t.Errorf("%s: the file is another", what)
		}
		want := map[bool]int{true: 1, false: 2}[what == "nothing"]
		if n := w.up.times("/packages/" + sum256(wheels[name]) + "/" + name); n != want {
			t.Errorf("%s: asked %d times, want %d", what, n, want)
		}
		if _, err := os.Lstat(filepath.Join(c.Dir, tempPrefix+"left")); err == nil {
			t.Error("a draft was left")
		}
	}
}

func change(path string, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	b := make([]byte, 1)
	_, err = f.ReadAt(b, at)
	if err == nil {
		b[0] ^= 1
		_, err = f.WriteAt(b, at)
	}
	return errorsJoin(err, f.Close())
}

func errorsJoin(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// TestTheCacheIsBounded: what was not used for longest goes.
func TestTheCacheIsBounded(t *testing.T) {
	c, err := openCache(t.TempDir(), 3000)
	if err != nil {
		t.Fatal(err)
	}
	put := func(key string) {
		t.Helper()
		body := bytes.Repeat([]byte(key), 600)
		d := c.create(600)
		if err := c.write(d, body); err != nil {
			t.Fatal(err)
		}
		if err := c.commit(d, footer{Key: key, Size: 600, SHA256: sum256(body)}); err != nil {
			t.Fatal(err)
		}
	}
	has := func(key string) bool {
		e, corrupt := c.get(key)
		if corrupt {
			t.Errorf("%s is corrupt", key)
		}
		if e != nil {
			_ = e.Close()
		}
		return e != nil
	}
	for _, k := range []string{"a", "b", "c"} {
		put(k)
	}
	if !has("a") {
		t.Error("a is gone")
	}
	put("d")
	put("e")
	if !has("a") || has("b") || !has("e") {
		t.Error("not what was used least is gone")
	}
	names, _ := filepath.Glob(filepath.Join(c.dir, "*"))
	var total int64
	for _, n := range names {
		i, err := os.Stat(n)
		if err != nil {
			t.Fatal(err)
		}
		total += i.Size()
	}
	if total != c.size() || total > 3000 {
		t.Errorf("%d bytes on disk, %d counted", total, c.size())
	}
	if c.create(4000) != nil {
		t.Error("more than the cache holds was begun")
	}
	d := c.create(-1)
	if err := c.write(d, make([]byte, 4000)); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("written: %v", err)
	}
	c.discard(d)
	put("f")
	if c.drafts != 0 {
		t.Errorf("%d bytes of drafts are counted", c.drafts)
	}
}

// TestAFullDiskServesThrough, from the first byte or from the next request.
func TestAFullDiskServesThrough(t *testing.T) {
	w := newWorld(t)
	name := "demo-1.0-py3-none-any.whl"
	wheels := w.up.pypi(t, "demo", release{"1.0", before})
	defer failpoint.Arm("mirror cache write", failpoint.Times(1000, syscall.ENOSPC))()
	for range 3 {
		w.get("pypi", "/simple/demo/").want(t, 200, name)
		if a := w.get("pypi", "/files/demo/"+name).want(t, 200); a.body != string(wheels[name]) {
			t.Error("the file is another")
		}
	}
	names, _ := filepath.Glob(filepath.Join(w.m.c.Dir, "*"))
	if len(names) != 0 {
		t.Errorf("left: %v", names)
	}
}

// TestTheDirectoryIsOursAlone: who else can write there gives packages to sandboxes.
func TestTheDirectoryIsOursAlone(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := openCache(dir, 1); dsec.ClassOf(err) != dsec.PermissionDenied {
		t.Errorf("open to all: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if _, err := openCache(link, 1); dsec.ClassOf(err) != dsec.PermissionDenied {
		t.Errorf("a link: %v", err)
	}
}

// TestTheEntryIsWhatItsFormatSays, so that a later version reads it: docs/formats/mirror.md.
func TestTheEntryIsWhatItsFormatSays(t *testing.T) {
	body := []byte("a body\n")
	end, err := footer{Key: "application/json https://registry.example/demo", Size: int64(len(body)), SHA256: sum256(body), ETag: `"abc"`}.encode()
	if err != nil {
		t.Fatal(err)
	}
	golden, err := os.ReadFile("testdata/entry-v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(append(body, end...)); got != strings.TrimSpace(string(golden)) {
		t.Errorf("an entry is now\n%s", got)
	}
	b, _ := hex.DecodeString(strings.TrimSpace(string(golden)))
	if f, err := decodeFooter(bytes.NewReader(b), int64(len(b))); err != nil || f.ETag != `"abc"` || f.Size != 7 {
		t.Errorf("%+v %v", f, err)
	}
}

func FuzzEntry(f *testing.F) {
	end, _ := footer{Key: "k", Size: 1, SHA256: "x"}.encode()
	f.Add(append([]byte("b"), end...))
	f.Add([]byte(footerMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		foot, err := decodeFooter(bytes.NewReader(b), int64(len(b)))
		switch {
		case err != nil && dsec.ClassOf(err) != dsec.Corrupt:
			t.Fatalf("%v", err)
		case err == nil && (foot.Size < 0 || foot.Size > int64(len(b))):
			t.Fatalf("%+v of %d bytes", foot, len(b))
		}
	})
}
