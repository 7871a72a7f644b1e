package snapshot

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// scrubbed packs what fill makes and returns the paths that the report has, by why.
func scrubbed(t *testing.T, rules dsec.Scrub, fill func(dir string)) (removed, suspicious map[string]string, m made) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	dir := t.TempDir()
	fill(dir)
	up, err := os.Open(dir)
	must(t, err)
	defer up.Close()
	m, err = packInto(t, Source{Upper: up, IDs: 65536}, Options{Scrub: rules})
	must(t, err)
	paths := func(fs []dsec.Finding) map[string]string {
		out := map[string]string{}
		for _, f := range fs {
			out[f.Path] = f.Why
		}
		return out
	}
	return paths(m.Report.Removed), paths(m.Report.Suspicious), m
}

func put(t *testing.T, dir, name, content string) {
	t.Helper()
	must(t, os.MkdirAll(dir+"/"+name[:strings.LastIndexByte("/"+name, '/')], 0o755))
	must(t, os.WriteFile(dir+"/"+name, []byte(content), 0o644))
}

// TestMoreRulesRemoveMore: a rule by which only a name goes takes nothing from
// one that takes the file under all its names, above it or on the same name.
func TestMoreRulesRemoveMore(t *testing.T) {
	secret := "these are the answers to everything\n"
	token := "key=ghp_" + strings.Repeat("a", 36) + "\n"
	fill := func(dir string) {
		put(t, dir, "root/.cache/proj/answers", secret)
		must(t, os.Link(dir+"/root/.cache/proj/answers", dir+"/a-link"))
		put(t, dir, "z-copy", secret)
		put(t, dir, "root/.cache/.env", token)
		must(t, os.Link(dir+"/root/.cache/.env", dir+"/b-link"))
		put(t, dir, "root/.cache/deep/er/.env", token+token)
		put(t, dir, "y-copy", token+token)
		put(t, dir, "root/.cache/lib/x.py", "installed by a link")
		must(t, os.Link(dir+"/root/.cache/lib/x.py", dir+"/x.py"))
		put(t, dir, "home/.cache/.env", "DEBUG=1\n")
	}
	few := dsec.Scrub{Credentials: true, Patterns: []string{"/root/.cache/proj/answers"}}
	more := few
	more.Caches = true
	before, _, _ := scrubbed(t, few, fill)
	after, _, m := scrubbed(t, more, fill)
	for path := range before {
		if after[path] == "" {
			t.Errorf("%s goes only without the rule for caches", path)
		}
	}
	for _, path := range []string{"/a-link", "/z-copy", "/b-link", "/y-copy", "/home/.cache/.env"} {
		if after[path] == "" {
			t.Errorf("%s stays", path)
		}
	}
	if after["/x.py"] != "" {
		t.Error("what was installed from a cache goes")
	}
	if strings.Contains(string(m.data), secret) || strings.Contains(string(m.data), token) {
		t.Error("it is in the data")
	}
}

func TestCredentialsInLargeFiles(t *testing.T) {
	pad := strings.Repeat("# nothing of interest\n", maxLooked/20)
	removed, _, m := scrubbed(t, dsec.ScrubAll(), func(dir string) {
		put(t, dir, "a/.env", "API_KEY=Zk29fjQ1xpq83hf\n"+pad)
		put(t, dir, "b/.npmrc", pad+"//registry.example/:_authToken=Zk29fjQ1xpq83hf\n")
		put(t, dir, "c/.npmrc", "fund=false\n")
	})
	if len(removed) != 1 || removed["/a/.env"] != "a credential in it" || m.Report.Unread != 1 {
		t.Errorf("removed %v, %d unread", removed, m.Report.Unread)
	}
}

func TestTokensInNamesAreReported(t *testing.T) {
	token := "ghp_" + strings.Repeat("b", 36)
	removed, suspicious, _ := scrubbed(t, dsec.ScrubAll(), func(dir string) {
		put(t, dir, "src/"+token, "")
		must(t, os.Link(dir+"/src/"+token, dir+"/src/2-"+token))
		put(t, dir, "src/d-"+token+"/f", "")
		put(t, dir, ".cache/x/"+token, "")
	})
	for _, path := range []string{"/src/" + token, "/src/2-" + token, "/src/d-" + token} {
		if suspicious[path] != "a GitHub token in its name" {
			t.Errorf("%s: %q", path, suspicious[path])
		}
	}
	if len(suspicious) != 3 || len(removed) != 2 {
		t.Errorf("suspicious %v, removed %v", suspicious, removed)
	}
}

// TestOnlyFilesArePublicKeys: what is in a directory is not public for its name.
func TestOnlyFilesArePublicKeys(t *testing.T) {
	removed, _, _ := scrubbed(t, dsec.ScrubAll(), func(dir string) {
		put(t, dir, "root/.ssh/id_rsa.pub", "ssh-rsa AAAA me\n")
		put(t, dir, "root/.ssh/id_keys.pub/key", "some private key\n")
		put(t, dir, "copy", "some private key\n")
	})
	var paths []string
	for p := range removed {
		paths = append(paths, p)
	}
	slices.Sort(paths)
	if !slices.Equal(paths, []string{"/copy", "/root/.ssh/id_keys.pub", "/root/.ssh/id_keys.pub/key"}) {
		t.Errorf("removed %v", paths)
	}
}
