package snapshot

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// upperLayer makes a layer of an upper directory as it is, with what overlayfs
// noted of directories that were renamed.
func upperLayer(t *testing.T, s *stack) layer.Local {
	t.Helper()
	m, err := written(t, func(f image.Files) (Result, error) {
		loc, err := image.Locate("dir:" + s.upper().Name())
		if err != nil {
			return Result{}, err
		}
		r, err := image.Convert(t.Context(), loc, f, image.Options{KeepWhiteouts: true})
		return Result{MetaSize: r.MetaSize, DataSize: r.DataSize}, err
	})
	must(t, err)
	return m.Local
}

// TestBelowFollowsWhatWasRenamed compares what is found in layers in which
// directories were renamed, once and again, with what the kernel shows of them.
func TestBelowFollowsWhatWasRenamed(t *testing.T) {
	m := openMounts(t)
	layers := []layer.Local{treeLayer(t, fillBase)}
	redirects := 0
	for _, moves := range [][2]string{{"moved", "aside"}, {"aside/a", "merged/was-a"}, {"merged", "aside/in"}, {"aside", "back"}, {"back/in/was-a/b", "moved"}} {
		s := newStack(t, m, layers...)
		must(t, os.Rename(s.path(moves[0]), s.path(moves[1])))
		s.write(moves[1]+"/new", "new")
		if n, _ := unix.Lgetxattr(s.upper().Name()+"/"+moves[1], redirectXattr, make([]byte, 4096)); n > 0 {
			redirects++
		}
		layers = append(layers, upperLayer(t, s))
	}
	if redirects < 4 {
		t.Errorf("%d renamed directories: the test tests little", redirects)
	}
	s := newStack(t, m, layers...)
	below, err := OpenBelow(layers)
	must(t, err)
	defer below.Close()
	found := 0
	for name := range tree(t, s.path(".")) {
		n, err := below.Find(name)
		must(t, err)
		var st unix.Stat_t
		must(t, unix.Lstat(s.path(name), &st))
		if n == nil || n.Mode != st.Mode || n.Mtime != st.Mtim.Sec || n.Mode&unix.S_IFMT == unix.S_IFREG && n.Size != st.Size {
			t.Errorf("%s: found %+v, the kernel shows mode %o of %d bytes", name, n, st.Mode, st.Size)
		}
		found++
	}
	for _, name := range []string{"aside", "moved/a", "merged", "back/a", "back/in/was-a/b"} {
		if has, err := below.Has(name); err != nil || has {
			t.Errorf("%s was renamed and is found, %v", name, err)
		}
	}
	// A chain on them that removes what is only there because it was followed.
	must(t, os.Remove(s.path("moved/f")))
	must(t, os.RemoveAll(s.path("back/in/sub")))
	one := s.pack(Options{}).Local
	s = newStack(t, m, append(layers[:len(layers):len(layers)], one)...)
	s.write("top", "top")
	two := s.pack(Options{}).Local
	want := tree(t, newStack(t, m, append(layers[:len(layers):len(layers)], one, two)...).path("."))
	merged := mergeOf(t, layers, []layer.Local{one, two})
	sameTrees(t, want, tree(t, newStack(t, m, append(layers[:len(layers):len(layers)], merged.Local)...).path(".")))
	if _, ok := want["moved/f"]; ok || found < 10 || !strings.Contains(want["moved/new"], "size 3") {
		t.Errorf("%d names: %v", found, want)
	}
}
