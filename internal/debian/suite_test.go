package debian

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian/debiantest"
)

const codename = "book"

// tool is a package of an archive with something to interrupt.
func tool(t testing.TB, version string) debiantest.Package {
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(i * i >> 7)
	}
	return debiantest.Package{Name: "tool", Version: version, Deb: debiantest.Deb(t, "", debiantest.File{Name: "./bin/tool", Content: content})}
}

func archive(t *testing.T) *debiantest.Archive {
	a := debiantest.New(t, codename)
	a.Suites[0].Packages = []debiantest.Package{tool(t, "1.0-1")}
	return a
}

func config(t *testing.T, a *debiantest.Archive, cache string) Config {
	t.Helper()
	sources, err := ReadSources(a.Apt)
	if err != nil {
		t.Fatal(err)
	}
	return Config{Sources: sources, Keyring: a.Keyring, Cache: Cache{cache}, Arch: "amd64", Pause: time.Millisecond}
}

// get does all there is to do with a package.
func get(ctx context.Context, cfg Config) (string, error) {
	s, err := Open(ctx, codename, cfg)
	if err != nil {
		return "", err
	}
	found, err := s.Find(ctx, "tool")
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", dsec.E(dsec.NotFound, "find", "tool", nil)
	}
	return s.Fetch(ctx, found[0])
}

// clean wants a cache in which nobody left what is not whole.
func clean(t *testing.T, dir string) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(dir, "tmp-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left in the cache: %v %v", left, err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "files", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if sum, _ := sumOf(bytes.NewReader(b)); sum != filepath.Base(f) {
			t.Errorf("in the cache under a wrong name: %s", f)
		}
	}
}

func TestAPackageIsFoundAndFetched(t *testing.T) {
	for _, suffixes := range [][]string{{".xz", ".gz", ""}, {".gz"}, {""}} {
		for _, byHash := range []bool{false, true} {
			a := archive(t)
			a.Suffixes, a.ByHash = suffixes, byHash
			newer := tool(t, "1.10-1")
			newer.Deb = append(newer.Deb, "\n"...)
			a.Suites = append(a.Suites, &debiantest.Suite{Name: codename + "-security", Date: time.Now(), ValidUntil: time.Now().Add(time.Hour),
				Packages: []debiantest.Package{newer, {Name: "tools", Version: "9", Deb: []byte("another")}}})
			a.Publish()
			dir := t.TempDir()
			name, err := get(t.Context(), config(t, a, dir))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, newer.Deb) {
				t.Errorf("%v by hash %v: not the newest package (%v)", suffixes, byHash, err)
			}
			clean(t, dir)
			a.Asked()
			if _, err := get(t.Context(), config(t, a, dir)); err != nil {
				t.Error(err)
			}
			if asked := a.Asked(); len(asked) != 2 {
				t.Errorf("%v: with all in the cache only the Releases are asked for, not %v", suffixes, asked)
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	const release, list, deb = "/InRelease", "/Packages.xz", "/tool_1.0-1_amd64.deb"
	cut := func(b []byte) []byte { return b[:len(b)/2] }
	longer := func(b []byte) []byte { return append(b, 'x') }
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	gone := func([]byte) []byte { return nil }
	cases := []struct {
		name   string
		before func(a *debiantest.Archive) // it is published
		after  func(a *debiantest.Archive)
		class  dsec.Class
		text   string
	}{
		{"wrong key", nil, func(a *debiantest.Archive) { a.WriteKeyring(debiantest.NewKey(t)) }, dsec.PermissionDenied, "InRelease"},
		{"no keyring", nil, func(a *debiantest.Archive) { _ = os.Remove(a.Keyring) }, dsec.NotFound, "keyring"},
		{"keyring damaged", nil, func(a *debiantest.Archive) { _ = os.WriteFile(a.Keyring, []byte("keys"), 0o644) }, dsec.Invalid, "keyring"},
		{"unsigned", nil, func(a *debiantest.Archive) {
			a.Change(release, func(b []byte) []byte { return []byte("Codename: book\n") })
		}, dsec.PermissionDenied, "not signed"},
		{"changed after it was signed", nil, func(a *debiantest.Archive) {
			a.Change(release, func(b []byte) []byte { return bytes.Replace(b, []byte("Test"), []byte("Evil"), 1) })
		}, dsec.PermissionDenied, "InRelease"},
		{"text before what is signed", nil, func(a *debiantest.Archive) {
			a.Change(release, func(b []byte) []byte { return append([]byte("Codename: book\n"), b...) })
		}, dsec.PermissionDenied, "not signed"},
		{"text behind what is signed", nil, func(a *debiantest.Archive) {
			a.Change(release, func(b []byte) []byte { return append(b, "Codename: book\n"...) })
		}, dsec.PermissionDenied, "not exactly one"},
		{"signature cut off", nil, func(a *debiantest.Archive) { a.Change(release, cut) }, dsec.PermissionDenied, "InRelease"},
		{"release too large", nil, func(a *debiantest.Archive) {
			a.Change(release, func(b []byte) []byte { return make([]byte, maxRelease+1) })
		}, dsec.Corrupt, "at most"},
		{"no release", nil, func(a *debiantest.Archive) { a.Change(release, gone) }, dsec.NotFound, "404"},
		{"expired", func(a *debiantest.Archive) { a.Suites[0].ValidUntil = time.Now().Add(-time.Minute) }, nil, dsec.Corrupt, "valid until"},
		{"another suite", nil, func(a *debiantest.Archive) {
			old := a.Suites[0].Name
			a.Suites[0].Name = "worm"
			a.Publish()
			other := a.File("/debian/dists/worm/InRelease")
			a.Suites[0].Name = old
			a.Publish()
			a.Change(release, func([]byte) []byte { return other })
		}, dsec.Corrupt, `not of "book"`},
		{"list changed", nil, func(a *debiantest.Archive) { a.Change(list, flip) }, dsec.Corrupt, "digest"},
		{"list cut off", nil, func(a *debiantest.Archive) { a.Change(list, cut) }, dsec.Corrupt, "promised"},
		{"list longer", nil, func(a *debiantest.Archive) { a.Change(list, longer) }, dsec.Corrupt, "at most"},
		{"list gone", nil, func(a *debiantest.Archive) { a.Change(list, gone) }, dsec.NotFound, "404"},
		{"no list for this machine", func(a *debiantest.Archive) { a.Suffixes = nil }, nil, dsec.NotFound, "architecture"},
		{"package changed", nil, func(a *debiantest.Archive) { a.Change(deb, flip) }, dsec.Corrupt, "digest"},
		{"package cut off", nil, func(a *debiantest.Archive) { a.Change(deb, cut) }, dsec.Corrupt, "promised"},
		{"package longer", nil, func(a *debiantest.Archive) { a.Change(deb, longer) }, dsec.Corrupt, "at most"},
		{"package gone", nil, func(a *debiantest.Archive) { a.Change(deb, gone) }, dsec.NotFound, "404"},
		{"package elsewhere", func(a *debiantest.Archive) { a.Suites[0].Packages[0].Filename = "../../secret" }, nil, dsec.Corrupt, "file"},
		{"package with a query", func(a *debiantest.Archive) { a.Suites[0].Packages[0].Filename = "pool/x?y" }, nil, dsec.Corrupt, "file"},
		{"no such package", func(a *debiantest.Archive) { a.Suites[0].Packages[0].Name = "tool2" }, nil, dsec.NotFound, "tool"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := archive(t)
			if c.before != nil {
				c.before(a)
			}
			a.Publish()
			if c.after != nil {
				c.after(a)
			}
			dir := t.TempDir()
			_, err := get(t.Context(), config(t, a, dir))
			if dsec.ClassOf(err) != c.class || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v (%s), want %s with %q", err, dsec.ClassOf(err), c.class, c.text)
			}
			clean(t, dir)
		})
	}
}

func TestExpiredReleasesAreTakenWhereThatIsAllowed(t *testing.T) {
	a := archive(t)
	a.Suites[0].ValidUntil = time.Now().Add(-time.Minute)
	a.Publish()
	cfg := config(t, a, t.TempDir())
	cfg.AllowExpired = true
	if _, err := get(t.Context(), cfg); err != nil {
		t.Error(err)
	}
}

func TestAnOlderStateOfASuiteIsRefused(t *testing.T) {
	a := archive(t)
	a.Publish()
	cfg := config(t, a, t.TempDir())
	if _, err := get(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	a.Suites[0].Date = a.Suites[0].Date.Add(-time.Hour)
	a.Publish()
	if _, err := get(t.Context(), cfg); dsec.ClassOf(err) != dsec.Corrupt || !strings.Contains(err.Error(), "was there before") {
		t.Errorf("an older Release: %v", err)
	}
	a.Suites[0].Date = a.Suites[0].Date.Add(2 * time.Hour)
	a.Publish()
	if _, err := get(t.Context(), cfg); err != nil {
		t.Error(err)
	}
}

// One signature of a known key is enough, wherever it stands.
func TestASecondSignature(t *testing.T) {
	known, unknown := debiantest.NewKey(t), debiantest.NewKey(t)
	for _, keys := range [][]int{{0, 1}, {1, 0}} {
		both := debiantest.Sign(t, "Codename: x\n", known, unknown)
		if keys[0] == 1 {
			both = debiantest.Sign(t, "Codename: x\n", unknown, known)
		}
		if text, err := verifyRelease(both, openpgp.EntityList{known}, "x", time.Now()); err != nil || !strings.Contains(string(text), "Codename") {
			t.Errorf("%v: %v", keys, err)
		}
		if _, err := verifyRelease(both, openpgp.EntityList{debiantest.NewKey(t)}, "x", time.Now()); dsec.ClassOf(err) != dsec.PermissionDenied {
			t.Errorf("with a third key: %v", err)
		}
	}
}

func TestABrokenDownloadIsTakenUpWhereItBroke(t *testing.T) {
	a := archive(t)
	a.Publish()
	var n atomic.Int32
	a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, ".deb") || n.Add(1) > 1 {
			return false
		}
		content := a.File(r.URL.Path)
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		_, _ = w.Write(content[:300000])
		panic(http.ErrAbortHandler)
	})
	dir := t.TempDir()
	name, err := get(t.Context(), config(t, a, dir))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, a.Suites[0].Packages[0].Deb) {
		t.Errorf("it is not the package (%v)", err)
	}
	asked := a.Asked()
	rest := slices.IndexFunc(asked, func(s string) bool { return strings.Contains(s, ".deb bytes=") })
	if rest < 0 || strings.HasSuffix(asked[rest], "bytes=0-") {
		t.Errorf("the rest was not asked for: %v", asked)
	}
	clean(t, dir)
}

// A mirror that knows no ranges begins anew each time, and is given up though
// bytes come each time.
func TestAMirrorThatAlwaysBreaksIsGivenUp(t *testing.T) {
	a := archive(t)
	a.Publish()
	var n atomic.Int32
	a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, ".deb") {
			return false
		}
		content := a.File(r.URL.Path)
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		_, _ = w.Write(content[:200000+100000*(n.Add(1)%2)])
		panic(http.ErrAbortHandler)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := get(ctx, config(t, a, t.TempDir())); dsec.ClassOf(err) != dsec.Unavailable || n.Load() > 2*tries {
		t.Errorf("%v after %d requests", err, n.Load())
	}
}

// A file that becomes another between two pieces is asked for once more, whole.
func TestPiecesOfTwoStatesAreNotPutTogether(t *testing.T) {
	a := archive(t)
	a.Publish()
	var n atomic.Int32
	a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, ".deb") || n.Add(1) > 1 {
			return false
		}
		other := bytes.Repeat([]byte{7}, len(a.File(r.URL.Path)))
		w.Header().Set("Content-Length", strconv.Itoa(len(other)))
		_, _ = w.Write(other[:300000])
		panic(http.ErrAbortHandler)
	})
	if _, err := get(t.Context(), config(t, a, t.TempDir())); err != nil {
		t.Error(err)
	}
	if asked := a.Asked(); strings.Contains(asked[len(asked)-1], "bytes=") {
		t.Errorf("not asked for from the beginning: %v", asked)
	}
}

func TestAMirrorThatIsAwayIsAskedAgain(t *testing.T) {
	for _, c := range []struct {
		times int32
		ok    bool
	}{{tries - 1, true}, {1000, false}} {
		for _, how := range []string{"503", "hangs up"} {
			a := archive(t)
			a.Publish()
			var n atomic.Int32
			a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
				if n.Add(1) > c.times {
					return false
				}
				if how == "503" {
					http.Error(w, "later", http.StatusServiceUnavailable)
					return true
				}
				panic(http.ErrAbortHandler)
			})
			dir := t.TempDir()
			_, err := get(t.Context(), config(t, a, dir))
			if c.ok != (err == nil) || (err != nil && dsec.ClassOf(err) != dsec.Unavailable) {
				t.Errorf("%s, %d times: %v", how, c.times, err)
			}
			if asked := len(a.Asked()); !c.ok && asked != tries {
				t.Errorf("%s: asked %d times, not %d", how, asked, tries)
			}
			clean(t, dir)
		}
	}
}

func TestAMirrorThatSaysNothingMoreIsGivenUp(t *testing.T) {
	a := archive(t)
	a.Publish()
	a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, ".deb") {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(a.File(r.URL.Path))))
		_, _ = w.Write([]byte("!<arch>\n"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		return true
	})
	s, err := Open(t.Context(), codename, config(t, a, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	s.get.stall = 20 * time.Millisecond
	found, err := s.Find(t.Context(), "tool")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Fetch(t.Context(), found[0]); dsec.ClassOf(err) != dsec.Unavailable || !strings.Contains(err.Error(), "no byte in") {
		t.Errorf("a mirror that hangs: %v", err)
	}
	a.Intercept(func(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return true })
	if _, err := s.Fetch(t.Context(), found[0]); dsec.ClassOf(err) != dsec.Unavailable || !strings.Contains(err.Error(), "no byte in") {
		t.Errorf("a mirror that does not answer: %v", err)
	}
	s.get.stall = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.Fetch(ctx, found[0]); dsec.ClassOf(err) != dsec.Timeout {
		t.Errorf("the caller's time is over: %v", err)
	}
}

// A mirror need not say how much comes.
func TestAnAnswerWithoutAnEndIsRefused(t *testing.T) {
	a := archive(t)
	a.Publish()
	var n atomic.Int32
	a.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, ".deb") {
			return false
		}
		n.Add(1)
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				break
			}
		}
		return true
	})
	dir := t.TempDir()
	if _, err := get(t.Context(), config(t, a, dir)); dsec.ClassOf(err) != dsec.Corrupt || n.Load() != 1 {
		t.Errorf("%v after %d requests", err, n.Load())
	}
	clean(t, dir)
}

func TestADamagedFileOfTheCacheIsFetchedAgain(t *testing.T) {
	a := archive(t)
	a.Publish()
	cfg := config(t, a, t.TempDir())
	name, err := get(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, damage := range []func([]byte) []byte{
		func(b []byte) []byte { b[100] ^= 1; return b },
		func(b []byte) []byte { return b[:1000] },
		func([]byte) []byte { return nil },
	} {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, damage(bytes.Clone(a.Suites[0].Packages[0].Deb)), 0o444); err != nil {
			t.Fatal(err)
		}
		if _, err := get(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		clean(t, cfg.Cache.Dir)
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, a.Suites[0].Packages[0].Deb) {
			t.Errorf("it is not the package (%v)", err)
		}
	}
}

func TestAFullDiskIsSaidAndLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=600k"); err != nil {
		t.Skipf("mount a small tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	a := archive(t)
	a.Publish()
	if _, err := get(t.Context(), config(t, a, dir)); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("%v (%s)", err, dsec.ClassOf(err))
	}
	clean(t, dir)
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "size=8m"); err != nil {
		t.Fatal(err)
	}
	if _, err := get(t.Context(), config(t, a, dir)); err != nil {
		t.Error(err)
	}
}

func TestSweepRemovesWhatKilledWritersLeft(t *testing.T) {
	c := Cache{t.TempDir()}
	f, err := c.temp("files")
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if err := os.MkdirAll(filepath.Join(c.Dir, "tmp-tree", "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := c.Sweep(); err != nil {
		t.Error(err)
	}
	clean(t, c.Dir)
}
