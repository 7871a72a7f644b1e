package debian

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian/debiantest"
)

func writeTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestSourcesOfApt(t *testing.T) {
	dir := writeTree(t, map[string]string{
		"sources.list": "# a comment\ndeb http://mirror.example/debian/ book main contrib # another\ndeb-src http://mirror.example/debian book main\n" +
			"deb cdrom:[Debian 12]/ book main\ndeb [ arch=amd64 signed-by=/k.gpg trusted=yes ] https://other.example/d tool stable\n",
		"sources.list.d/b.list": "deb file:/srv/debian book main\ndeb http://security.example/s book-security main\n" +
			"deb [signed-by=/usr/share/keyrings/debian-archive-book-stable.gpg] http://d.example book main\ndeb http://back.example book-backports main\ndeb http://x.example bookish main\n",
		"sources.list.d/a.sources": "# of the installer\nTypes: deb deb-src\nURIs: http://one.example/d http://two.example/d/\nSuites: book book-updates\n" +
			"Components: main\nSigned-By: /usr/k.gpg\n\nEnabled: no\nTypes: deb\nURIs: http://off.example\nSuites: book\nComponents: main\n\n" +
			"Types: deb\nURIs: http://inline.example/d\nSuites: book\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n\n" +
			"Types: deb-src\nURIs: http://src.example\nSuites: book\nComponents: main\n",
		"sources.list.d/ignored.save": "nonsense",
	})
	all, err := ReadSources(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range all {
		got = append(got, fmt.Sprintf("%s %s %s %q %v", s.URI, s.Suite, strings.Join(s.Components, "+"), s.SignedBy, s.IsOf("book", "/usr/k.gpg")))
	}
	want := []string{
		`http://mirror.example/debian book main+contrib "" true`,
		`https://other.example/d tool stable "/k.gpg" false`,
		`http://one.example/d book main "/usr/k.gpg" true`,
		`http://one.example/d book-updates main "/usr/k.gpg" true`,
		`http://two.example/d book main "/usr/k.gpg" true`,
		`http://two.example/d book-updates main "/usr/k.gpg" true`,
		`http://inline.example/d book main "" false`,
		`http://security.example/s book-security main "" true`,
		`http://d.example book main "/usr/share/keyrings/debian-archive-book-stable.gpg" true`,
		`http://back.example book-backports main "" false`,
		`http://x.example bookish main "" false`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for name, text := range map[string]string{"a.list": "debs http://x.example y main\n", "b.list": "deb [x http://x.example y\n", "c.list": "deb http://x.example\n",
		"d.sources": "Types: deb\nURIs: http://x.example\n", "e.sources": "Types: deb\nTypes: deb\n", "f.sources": " starts with a space\n"} {
		dir := writeTree(t, map[string]string{"sources.list.d/" + name: text})
		if _, err := ReadSources(dir); dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if all, err := ReadSources(t.TempDir()); err != nil || len(all) != 0 {
		t.Errorf("no configuration: %v %v", all, err)
	}
}

// The machine's own configuration is read as apt reads it.
func TestSourcesOfThisMachine(t *testing.T) {
	out, err := exec.Command("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages").Output()
	if err != nil {
		t.Skipf("apt-get indextargets: %v", err)
	}
	all, err := ReadSources("/etc/apt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		uri, suite, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(uri, "http") && !slices.ContainsFunc(all, func(s Source) bool { return s.URI+"/" == uri && s.Suite == suite }) {
			t.Errorf("apt knows %s %s; %v do not", uri, suite, all)
		}
	}
}

func TestVersionsAreOrderedAsDpkgOrdersThem(t *testing.T) {
	versions := []string{"1", "1.0", "1.0-1", "1.0-10", "1.0-9", "1.0~rc1", "1.0~~", "1.0+b1", "1.0a", "1.0.1", "1:0.5", "0:1", "2~", "2", "2a", "2+",
		"6.1.192-3", "6.1.176-1", "6.12.95-1~bpo12+1", "6.12.95-1", "007", "7", "1.2.3-4+deb12u1", "1.2.3-4", "1-2-3", "1-2", "10:0", "2:0"}
	for _, a := range versions {
		for _, b := range versions {
			op := map[int]string{-1: "lt", 0: "eq", 1: "gt"}[Compare(a, b)]
			if err := exec.Command("dpkg", "--compare-versions", a, op, b).Run(); err != nil {
				t.Errorf("%s is %s %s here; dpkg: %v", a, op, b, err)
			}
		}
	}
}

func TestStanzas(t *testing.T) {
	long := strings.Repeat("x", 200000)
	var got []string
	err := eachStanza(strings.NewReader("\n\nA: 1\n b\n\n \nA: 2\nB: "+long+"\n\n\nA: 3"), "x", func(text []byte) error {
		f, err := parseStanza(text, "x")
		got = append(got, fmt.Sprintf("%s %d", f["a"], len(f["b"])))
		return err
	})
	if err != nil || !slices.Equal(got, []string{"1\nb 0", "2 200000", "3 0"}) {
		t.Errorf("%q %v", got, err)
	}
	if err := eachStanza(strings.NewReader("A: "+strings.Repeat("x", maxStanza)), "x", func([]byte) error { return nil }); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("a stanza without an end: %v", err)
	}
}

func FuzzInRelease(f *testing.F) {
	key := debiantest.NewKey(f)
	f.Add(debiantest.Sign(f, "Codename: book\nDate: Sat, 28 Nov 2026 02:53:00 UTC\nSHA256:\n", key), false)
	f.Add([]byte("Codename: book\nDate: Sat, 28 Nov 2026 02:53:00 UTC\nSHA256:\n e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 0 main/x\n"), true)
	f.Fuzz(func(t *testing.T, text []byte, signed bool) {
		if !signed {
			if plain, err := verifyRelease(text, openpgp.EntityList{debiantest.NewKey(t)}, "x", time.Now()); err == nil {
				t.Errorf("believed: %q", plain)
			} else if dsec.ClassOf(err) != dsec.PermissionDenied {
				t.Errorf("%v (%s)", err, dsec.ClassOf(err))
			}
			return
		}
		r, err := parseRelease(text, "x")
		if err != nil {
			if dsec.ClassOf(err) != dsec.Corrupt {
				t.Errorf("%v (%s)", err, dsec.ClassOf(err))
			}
			return
		}
		for name, p := range r.files {
			if len(p.sum) != 64 || p.size < 0 || strings.HasPrefix(name, "/") || strings.Contains("/"+name+"/", "/../") {
				t.Errorf("%q %v", name, p)
			}
		}
	})
}

func FuzzPackages(f *testing.F) {
	f.Add([]byte("Package: tool\nVersion: 1\nFilename: pool/x.deb\nSize: 3\nSHA256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n\nPackage: b\n"))
	f.Add([]byte("Types: deb\nURIs: http://x.example\nSuites: y\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		err := eachStanza(bytes.NewReader(text), "x", func(text []byte) error {
			p, err := parsePackage(text, "x")
			if err == nil && (len(p.SHA256) != 64 || p.Size < 0 || p.Name == "" || strings.Contains("/"+p.url+"/", "/../")) {
				t.Errorf("%+v", p)
			}
			if err != nil && dsec.ClassOf(err) != dsec.Corrupt {
				t.Errorf("%v (%s)", err, dsec.ClassOf(err))
			}
			return nil
		})
		if err != nil && dsec.ClassOf(err) != dsec.Corrupt {
			t.Errorf("%v (%s)", err, dsec.ClassOf(err))
		}
		for _, parse := range []func([]byte, string) ([]Source, error){parseList, parseSources} {
			all, _ := parse(text, "x")
			for _, s := range all {
				if !strings.HasPrefix(s.URI, "http") {
					t.Errorf("%+v", s)
				}
			}
		}
		v := string(text)
		if Compare(v, v) != 0 {
			t.Errorf("%q is not itself", v)
		}
	})
}
