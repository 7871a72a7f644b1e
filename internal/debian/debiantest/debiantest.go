// Package debiantest is a Debian archive for tests: packages made by the test,
// lists and a Release signed with a key of the test's own, served by HTTP on a
// loopback address.
package debiantest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// Archive is one archive. What its fields say is served after Publish.
type Archive struct {
	URL     string
	Keyring string // file
	Apt     string // directory: a configuration of apt which names the archive

	Suites   []*Suite
	Suffixes []string // compressions of the lists: ".xz", ".gz", ""
	ByHash   bool

	t     testing.TB
	key   *openpgp.Entity
	mu    sync.Mutex
	hook  func(w http.ResponseWriter, r *http.Request) bool
	files map[string][]byte
	asked []string // "GET /path Range"
}

// Suite is one suite of it.
type Suite struct {
	Name       string
	Date       time.Time
	ValidUntil time.Time // zero: not said
	Packages   []Package
}

// Package is one package of a suite.
type Package struct {
	Name, Version, Depends string
	Filename               string // "": as usual
	Deb                    []byte
}

// New starts an archive with one suite, empty.
func New(t testing.TB, codename string) *Archive {
	t.Helper()
	a := &Archive{t: t, Suffixes: []string{".xz"}, files: map[string][]byte{}, key: NewKey(t)}
	server := httptest.NewServer(http.HandlerFunc(a.serve))
	t.Cleanup(server.Close)
	a.URL = server.URL
	a.Suites = []*Suite{{Name: codename, Date: time.Now().Add(-time.Hour)}}
	a.Apt = t.TempDir()
	a.Keyring = filepath.Join(a.Apt, "keyring.gpg")
	a.WriteKeyring(a.key)
	return a
}

// NewKey makes a key that signs.
func NewKey(t testing.TB) *openpgp.Entity {
	t.Helper()
	e, err := openpgp.NewEntity("Archive", "", "archive@example.org", &packet.Config{Algorithm: packet.PubKeyAlgoEdDSA,
		Time: func() time.Time { return time.Now().Add(-24 * time.Hour) }})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// WriteKeyring makes the file that says who is believed.
func (a *Archive) WriteKeyring(keys ...*openpgp.Entity) {
	a.t.Helper()
	var b bytes.Buffer
	for _, k := range keys {
		if err := k.Serialize(&b); err != nil {
			a.t.Fatal(err)
		}
	}
	a.write(a.Keyring, b.Bytes())
}

func (a *Archive) write(name string, content []byte) {
	a.t.Helper()
	if err := os.WriteFile(name, content, 0o644); err != nil {
		a.t.Fatal(err)
	}
}

// Publish makes all files of the archive anew.
func (a *Archive) Publish() {
	a.t.Helper()
	var list strings.Builder
	files := map[string][]byte{}
	for _, s := range a.Suites {
		fmt.Fprintf(&list, "deb [signed-by=%s] %s/debian/ %s main\n", a.Keyring, a.URL, s.Name)
		a.publish(s, files)
	}
	a.write(filepath.Join(a.Apt, "sources.list"), []byte(list.String()))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.files = files
}

func (a *Archive) publish(s *Suite, files map[string][]byte) {
	var list bytes.Buffer
	for _, p := range s.Packages {
		if p.Filename == "" {
			p.Filename = "pool/main/" + p.Name + "_" + p.Version + "_amd64.deb"
		}
		fmt.Fprintf(&list, "Package: %s\nVersion: %s\nArchitecture: amd64\n", p.Name, p.Version)
		if p.Depends != "" {
			fmt.Fprintf(&list, "Depends: %s\n", p.Depends)
		}
		fmt.Fprintf(&list, "Description: a package\n of a test\nFilename: %s\nSize: %d\nSHA256: %x\n\n", p.Filename, len(p.Deb), sha256.Sum256(p.Deb))
		files["/debian/"+p.Filename] = p.Deb
	}
	root := "/debian/dists/" + s.Name + "/"
	var rel strings.Builder
	fmt.Fprintf(&rel, "Origin: Test\nSuite: some\nCodename: %s\nDate: %s\n", s.Name, s.Date.UTC().Format(time.RFC1123))
	if !s.ValidUntil.IsZero() {
		fmt.Fprintf(&rel, "Valid-Until: %s\n", s.ValidUntil.UTC().Format(time.RFC1123))
	}
	if a.ByHash {
		rel.WriteString("Acquire-By-Hash: yes\n")
	}
	rel.WriteString("SHA256:\n")
	for _, suffix := range a.Suffixes {
		content := Compress(a.t, suffix, list.Bytes())
		sum := fmt.Sprintf("%x", sha256.Sum256(content))
		fmt.Fprintf(&rel, " %s %8d main/binary-amd64/Packages%s\n", sum, len(content), suffix)
		if a.ByHash {
			files[root+"main/binary-amd64/by-hash/SHA256/"+sum] = content
		} else {
			files[root+"main/binary-amd64/Packages"+suffix] = content
		}
	}
	files[root+"InRelease"] = Sign(a.t, rel.String(), a.key)
}

// Sign is the text as a signed message.
func Sign(t testing.TB, text string, keys ...*openpgp.Entity) []byte {
	t.Helper()
	var private []*packet.PrivateKey
	for _, k := range keys {
		private = append(private, k.PrivateKey)
	}
	var b bytes.Buffer
	w, err := clearsign.EncodeMulti(&b, private, nil)
	if err == nil {
		_, err = io.WriteString(w, text)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// Change replaces a file by what fn makes of it; nil removes it. The lists are
// left as they are.
func (a *Archive) Change(path string, fn func([]byte) []byte) {
	a.t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for name, content := range a.files {
		if strings.HasSuffix(name, path) {
			if content = fn(bytes.Clone(content)); content == nil {
				delete(a.files, name)
			} else {
				a.files[name] = content
			}
			return
		}
	}
	a.t.Fatalf("the archive has no %s", path)
}

// Intercept has fn see each request first; what it answers with true is
// answered. nil ends that.
func (a *Archive) Intercept(fn func(w http.ResponseWriter, r *http.Request) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hook = fn
}

// Asked returns the requests since the last call, as "path range".
func (a *Archive) Asked() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	asked := a.asked
	a.asked = nil
	return asked
}

// File is what the archive has at a path.
func (a *Archive) File(path string) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.files[path]
}

func (a *Archive) serve(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	a.asked = append(a.asked, strings.TrimSpace(r.URL.Path+" "+r.Header.Get("Range")))
	content, ok := a.files[r.URL.Path]
	hook := a.hook
	a.mu.Unlock()
	if hook != nil && hook(w, r) {
		return
	}
	if !ok {
		http.NotFound(w, r)
		return
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
}

// Compress by the suffix of a name.
func Compress(t testing.TB, suffix string, plain []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser
	var err error
	switch suffix {
	case "":
		return plain
	case ".gz":
		w = gzip.NewWriter(&b)
	case ".zst":
		w, err = zstd.NewWriter(&b)
	case ".xz":
		w, err = xz.NewWriter(&b)
	default:
		t.Fatalf("no compression %s", suffix)
	}
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// File is one file of a package.
type File struct {
	Name    string // as in the tar: "./boot/vmlinuz"
	Type    byte   // of package tar; 0: a regular file
	Link    string
	Content []byte
}

// Tar is the files as a tar.
func Tar(t testing.TB, files ...File) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		if f.Type == 0 {
			f.Type = tar.TypeReg
		}
		h := &tar.Header{Name: f.Name, Typeflag: f.Type, Linkname: f.Link, Size: int64(len(f.Content)), Mode: 0o644, Format: tar.FormatGNU}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.Content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Member is one member of an ar archive.
type Member struct {
	Name    string
	Content []byte
}

// Ar is the members as an ar archive.
func Ar(members ...Member) []byte {
	var b bytes.Buffer
	b.WriteString("!<arch>\n")
	for _, m := range members {
		fmt.Fprintf(&b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", m.Name, 0, 0, 0, "100644", len(m.Content))
		b.Write(m.Content)
		if len(m.Content)%2 == 1 {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}

// Deb is a package with these files, compressed by the suffix.
func Deb(t testing.TB, suffix string, files ...File) []byte {
	t.Helper()
	return Ar(Member{"debian-binary", []byte("2.0\n")}, Member{"control.tar.gz", Compress(t, ".gz", Tar(t))},
		Member{"data.tar" + suffix, Compress(t, suffix, Tar(t, files...))})
}
