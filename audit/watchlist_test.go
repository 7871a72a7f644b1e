package audit

import (
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func TestWatchlist(t *testing.T) {
	w, err := NewWatchlist([]string{"/tests/**", "**/answer.*", "/a/**/b/**/c", "/home/*/x"})
	must(t, err)
	for path, want := range map[string]bool{
		"/usr/bin/sh": true, "/bin/sh": true, "/usr/bin/a/b": false, "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2": true,
		"/lib64/ld-linux-x86-64.so.2": true, "/usr/lib/x86_64-linux-gnu/libc.so.6": true, "/etc/passwd": true, "/etc/passwd-": false,
		"/conftest.py": true, "/a/b/c/d/conftest.py": true, "/conftest.py/x": false, "/x/y.pth": true, "/r/.git/hooks/pre-commit": true, "/r/.git/x": false,
		"/tests": false, "/tests/a": true, "/tests/a/b/c": true, "/x/tests/a": false, "/answer.txt": true, "/q/answer.py": true,
		"/a/b/c": true, "/a/1/2/b/3/c": true, "/a/1/2/3/c": false, "/home/me/x": true, "/home/me/y/x": false, "/": false,
	} {
		if w.Match(path) != want {
			t.Errorf("%s: %t", path, !want)
		}
	}
	for name, want := range map[string]bool{"conftest.py": true, "passwd": true, "sh": false, "answer.1": true, "x": true, "y": false} {
		if w.MatchName(name) != want {
			t.Errorf("name %s: %t", name, !want)
		}
	}
	for dir, want := range map[string]bool{"/usr/bin": true, "/usr": false, "/home/me": true, "/etc": true, "/opt": false} {
		if w.MatchBelow(dir) != want {
			t.Errorf("below %s: %t", dir, !want)
		}
	}
}

func TestPatternsThatCannotBe(t *testing.T) {
	for _, bad := range [][]string{{"a"}, {""}, {"/["}, {"/**/a/**/b/**"}, {"/" + strings.Repeat("a", dsec.MaxWatchBytes)}, make([]string, 65)} {
		if err := dsec.CheckWatch(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestAMatchIsQuick whatever pattern and path are: both come from outside. When "**" was tried
// with every number of elements, one path took most of a second.
func TestAMatchIsQuick(t *testing.T) {
	more := make([]string, dsec.MaxWatch)
	for i := range more {
		more[i] = "**/a/**/b/a"
	}
	deepest, err := NewWatchlist(more)
	must(t, err)
	wide, err := NewWatchlist([]string{"/**/" + strings.Repeat("*a*/", 30) + "**/x"})
	must(t, err)
	for _, c := range []struct {
		of   *Watchlist
		path string
	}{{deepest, strings.Repeat("/a", 2000)}, {wide, "/" + strings.Repeat("aaaaaaaaaa/", 370) + "x"}} {
		best := time.Hour
		for range 5 { // others may have the processor
			began := time.Now()
			c.of.Match(c.path)
			best = min(best, time.Since(began))
		}
		if best > 50*time.Millisecond {
			t.Errorf("%.20s… took %v", c.path, best)
		}
	}
}

// BenchmarkMatch asks for a path that is not watched.
func BenchmarkMatch(b *testing.B) {
	w, err := NewWatchlist([]string{"/tests/**"})
	must(b, err)
	b.ReportAllocs()
	for b.Loop() {
		if w.Match("/made/src/project/t17.o") {
			b.Fatal("watched")
		}
	}
}
