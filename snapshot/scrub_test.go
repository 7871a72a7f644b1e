package snapshot

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// planted makes secrets that are found in raw bytes if they are anywhere.
type planted struct {
	t   *testing.T
	all []string
}

func (p *planted) secret() string {
	s := fmt.Sprintf("PLANTED-%03d-%x", len(p.all), sha256.Sum256([]byte{byte(len(p.all))}))[:40]
	p.all = append(p.all, s)
	return s
}

// wantNone looks for every secret in the bytes of both files.
func (p *planted) wantNone(m made) {
	p.t.Helper()
	for i, s := range p.all {
		if bytes.Contains(m.meta, []byte(s)) {
			p.t.Errorf("secret %d is in the metadata", i)
		}
		if bytes.Contains(m.data, []byte(s)) {
			p.t.Errorf("secret %d is in the data", i)
		}
	}
}

func TestNothingThatWasScrubbedIsInTheBytes(t *testing.T) {
	m := openMounts(t)
	base := treeLayer(t, func(dir string) {
		fillBase(dir)
		must(t, os.MkdirAll(dir+"/root/.ssh", 0o700))
		must(t, os.WriteFile(dir+"/root/.bash_history", []byte("of the image\n"), 0o600))
	})
	s, p := newStack(t, m, base), &planted{t: t}
	w := func(name string, pad int) { s.write(name, strings.Repeat("x", pad)+p.secret()+"\n") }

	// Where each rule looks.
	for _, name := range []string{"root/.bash_history", "home/u/.zsh_history", "home/u/.local/share/fish/fish_history", "root/.python_history", "root/.ssh/id_ed25519",
		"root/.aws/credentials", "root/.config/gcloud/a/b/c.db", "root/.docker/config.json", "root/.netrc", "root/.git-credentials", "root/.kube/config", "root/.pypirc",
		"root/.cache/pip/http/1/2/x", "var/cache/apt/archives/x.deb", "var/lib/apt/lists/x", "repo/__pycache__/m.pyc", "var/log/apt/history.log", "var/log/dpkg.log.1",
		"data/private/deep/er/f", "root/.gnupg/private-keys-v1.d/k.key", "root/.password-store/mail.gpg"} {
		w(name, 10)
	}
	s.write("root/.npmrc", "//registry.example/:_authToken="+p.secret()+"\n")
	s.write("repo/.git/config", "[remote \"origin\"]\n\turl = https://me:"+p.secret()+"@host.example/x.git\n")
	s.write("app/.env", "API_KEY="+p.secret()+"\n")
	// In names, targets and attributes of what goes.
	s.write("data/private/"+p.secret(), "x")
	must(t, os.Symlink(p.secret(), s.path("data/private/link")))
	s.write("root/.cache/"+p.secret()+"/f", "x")
	s.write("root/.ssh/id_rsa", "key")
	must(t, unix.Lsetxattr(s.path("root/.ssh/id_rsa"), "user.comment", []byte(p.secret()), 0))
	must(t, unix.Lsetxattr(s.path("root/.ssh/id_rsa"), "user."+p.secret(), []byte("v"), 0))
	// Under another name: as a hard link that comes first, as one that comes last, and as a copy.
	w("root/.ssh/id_ecdsa", 5000)
	must(t, os.Link(s.path("root/.ssh/id_ecdsa"), s.path("aaa-first")))
	must(t, os.MkdirAll(s.path("zzz"), 0o755))
	must(t, os.Link(s.path("root/.ssh/id_ecdsa"), s.path("zzz/last")))
	key, err := os.ReadFile(s.path("root/.ssh/id_ecdsa"))
	must(t, err)
	must(t, os.WriteFile(s.path("a-copy"), key, 0o644))
	inDir := p.secret()
	s.write("root/.password-store/linked", inDir+" and some more")
	must(t, os.Link(s.path("root/.password-store/linked"), s.path("elsewhere")))
	// Answers: whole, sparse, and with a hard link.
	answer := strings.Repeat("answer ", 30_000) + p.secret()
	s.write("tests/expected", answer)
	must(t, os.Link(s.path("tests/expected"), s.path("tests/also")))
	s.write("copy/of/it", answer)
	tail := p.secret()
	f, err := os.Create(s.path("sparse-answer"))
	must(t, err)
	_, err = f.WriteAt([]byte(tail), 3<<20)
	must(t, err)
	must(t, f.Truncate(5<<20))
	must(t, f.Close())
	h := sha256.New()
	h.Write(append(append(make([]byte, 3<<20), tail...), make([]byte, 2<<20-len(tail))...))
	// Deleted, overwritten, and in the slack of a block and behind a shorter end.
	w("deleted", 100)
	must(t, os.Remove(s.path("deleted")))
	for _, name := range []string{"slack", "longer"} {
		s.write(name, "kept"+p.secret())
		must(t, os.Truncate(s.path(name), 4))
	}
	must(t, os.Truncate(s.path("longer"), 9000))
	s.write("replaced-content", p.secret())
	s.write("replaced-content", "fine")
	// What stays.
	s.write("root/.ssh/known_hosts", "host.example ssh-ed25519 AAAA\n")
	s.write("root/.ssh/id_ed25519.pub", "ssh-ed25519 AAAA me\n")
	s.write("home/u/.npmrc", "fund=false\n")
	s.write("src/main.py", "print('hello')\n")
	must(t, os.Remove(s.path("etc/passwd"))) // a whiteout

	rules := dsec.ScrubAll()
	rules.Patterns = []string{"/data/private", "/nothing/**"}
	rules.Answers = []string{fmt.Sprintf("%x", sha256.Sum256([]byte(answer))), fmt.Sprintf("%x", h.Sum(nil))}
	src := s.source()
	src.Below, err = OpenBelow(s.layers)
	must(t, err)
	defer src.Below.Close()
	got, err := packInto(t, src, Options{Scrub: rules})
	must(t, err)
	p.wantNone(got)
	// The same without: so that the search is known to find them.
	if plain := s.pack(Options{}); !bytes.Contains(plain.data, []byte(inDir)) || !bytes.Contains(plain.meta, []byte(p.all[24])) {
		t.Error("the search finds nothing where something is")
	}

	wantKept(t, newStack(t, m, base, got.Local), got.Report)
}

// wantKept looks at what survived, and at what the report says of the rest.
func wantKept(t *testing.T, again *stack, r *dsec.ScrubReport) {
	t.Helper()
	for _, name := range []string{"root/.ssh/known_hosts", "root/.ssh/id_ed25519.pub", "home/u/.npmrc", "src/main.py", "slack", "longer", "root/.cache", "root/.bash_history"} {
		if _, err := os.Lstat(again.path(name)); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(again.path("etc/passwd")); err == nil {
		t.Error("what was deleted is there again")
	}
	if r == nil || r.Version != 1 || r.Digest() == "" || r.RemovedCount < 30 {
		t.Fatalf("report %+v", r)
	}
	for _, f := range r.Removed {
		if f.Below != (f.Path == "/root/.bash_history") {
			t.Errorf("below: %+v", f)
		}
	}
	for path, why := range map[string]string{"/root/.bash_history": "history", "/aaa-first": "credentials", "/zzz/last": "credentials", "/a-copy": "a copy of what was removed: credentials",
		"/tests/expected": "a known answer", "/sparse-answer": "a known answer", "/elsewhere": "credentials", "/data/private": "matches /data/private",
		"/root/.npmrc": "a credential in it", "/var/log/dpkg.log.1": "log of a package manager", "/root/.cache/pip": "cache"} {
		if !slices.ContainsFunc(r.Removed, func(f dsec.Finding) bool { return f.Path == path && f.Why == why }) {
			t.Errorf("the report does not say of %s: %s", path, why)
		}
	}
}

func TestSuspiciousFilesAreReportedAndKept(t *testing.T) {
	m := openMounts(t)
	s := newStack(t, m, treeLayer(t, fillBase))
	s.write("srv/deploy.pem", "x\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n")
	s.write("notes.txt", "line\nthe key is AKIA"+"ABCDEFGHIJKLMNOP\n")
	s.write("conf/app.yaml", "db:\n  password: 'pq83hf-Zk29fjQ1x'\n")
	s.write("etc/plain.conf", "password = changeme\n")
	s.write("opt/tool/app.yaml", "password: 'pq83hf-Zk29fjQ1x'\n") // where packages are
	s.write("repo/prog", "\x7fELF"+strings.Repeat("\x00", 100))
	s.write("usr/bin/prog", "\x7fELF"+strings.Repeat("\x00", 100))
	s.write("sudo", "#!/bin/sh\n")
	must(t, unix.Chmod(s.path("sudo"), 0o4755))
	must(t, os.Symlink("https://u:verysecret@host.example/", s.path("link")))
	answer := "the answer\n"
	s.write("almost", "  the answer\r\n\r\n")
	f, err := os.Create(s.path("large.bin"))
	must(t, err)
	must(t, f.Truncate(largeFile))
	must(t, f.Close())
	got := s.pack(Options{Scrub: dsec.Scrub{Histories: true, Answers: []string{fmt.Sprintf("%x", sha256.Sum256([]byte(answer)))}}})
	want := map[string]string{"/srv/deploy.pem": "a private key:2", "/notes.txt": "an AWS key:2", "/conf/app.yaml": "a value that looks random, of password:2",
		"/repo/prog": "a program outside of the usual places:0", "/sudo": "a program that runs as its owner:0", "/link": "a password in an address in its target:0",
		"/almost": "a known answer but for the white space at its ends:0", "/large.bin": "a large file outside of the usual places:0"}
	for _, f := range got.Report.Suspicious {
		if have := fmt.Sprint(f.Why, ":", f.Line); want[f.Path] != have {
			t.Errorf("%s: %s", f.Path, have)
		}
		delete(want, f.Path)
	}
	if len(want) > 0 || got.Report.RemovedCount != 0 {
		t.Errorf("not seen: %v, removed %+v", want, got.Report.Removed)
	}
}

// TestCachesGoByNameOnly: package managers link from their caches into what
// they install.
func TestCachesGoByNameOnly(t *testing.T) {
	m := openMounts(t)
	s := newStack(t, m, treeLayer(t, fillBase))
	s.write("root/.cache/uv/x.py", "module")
	must(t, os.MkdirAll(s.path("venv/lib"), 0o755))
	must(t, os.Link(s.path("root/.cache/uv/x.py"), s.path("venv/lib/x.py")))
	got := s.pack(Options{Scrub: dsec.ScrubAll()})
	again := newStack(t, m, s.layers[0], got.Local)
	if b, err := os.ReadFile(again.path("venv/lib/x.py")); err != nil || string(b) != "module" {
		t.Errorf("%q %v", b, err)
	}
	if left, err := os.ReadDir(again.path("root/.cache")); err != nil || len(left) > 0 {
		t.Errorf("the cache holds %v %v", left, err)
	}
}

func TestAReportHoldsNoSecretAndIsBounded(t *testing.T) {
	m := openMounts(t)
	s := newStack(t, m, treeLayer(t, fillBase))
	for i := range dsec.MaxFindings + 50 {
		s.write(fmt.Sprintf("c/%d/.netrc", i), "machine x password topsecretvalue")
	}
	s.write("x\xff\x1b[31m/.netrc", "p")
	got := s.pack(Options{Scrub: dsec.Scrub{Credentials: true}})
	r := got.Report
	if len(r.Removed) != dsec.MaxFindings || r.RemovedCount != dsec.MaxFindings+51 {
		t.Errorf("%d listed of %d", len(r.Removed), r.RemovedCount)
	}
	if strings.Contains(fmt.Sprintf("%+v", r), "topsecret") {
		t.Error("the report holds what was removed")
	}
	if p := shown("x\xff\x1b[31m"); p != `/x\xff\x1b[31m` {
		t.Errorf("shown as %q", p)
	}
}

func TestRulesMatchWholeComponents(t *testing.T) {
	s := newScrubber(dsec.ScrubAll(), nil)
	for name, want := range map[string]string{"root/.ssh/id_rsa": "credentials", "root/x.ssh/id_rsa": "", "id_rsa": "", "a/.bash_history": "history", ".bash_history": "history",
		"a/my.bash_history": "", "usr/share/doc/.netrc.md": "", ".netrc": "credentials", "root/.cache": "", "root/.cache/x": "cache", "var/cache/apt": "", "var/cache/apt/x": "cache",
		"var/log/syslog": "", "var/log/apt/term.log": "log of a package manager", ".ssh/id_rsa.pub": "", "x/.env": "a credential in it", "x/environment": ""} {
		if got := s.rule(name, false); cmp.Or(got.name, got.all) != want {
			t.Errorf("%s: %+v, want %q", name, got, want)
		}
	}
}
