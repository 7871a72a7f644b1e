package vm

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"github.com/opendsec/dsec/internal/debian"
)

// mirror is an archive on a loopback address which has what apt fetches: the
// files of the machine's own sources, by the machine's own client. Machines
// which let nothing but apt out can so build a kernel, and nothing that apt has
// verified has to be believed: the one who asks verifies all of it again.
type mirror struct {
	dir     string   // apt's state, and what it fetched
	options []string // for every program of apt
	server  *httptest.Server

	mu    sync.Mutex        // one apt at a time
	files map[string]string // path of a URL → apt's file; nil: apt was not asked yet
}

// startMirror begins to serve the Debian suites of the machine's sources with
// this codename. apt is asked on the first request. Sources returns a
// configuration directory which names the mirror instead.
func startMirror(ctx context.Context, dir, codename string) (*mirror, error) {
	m := &mirror{dir: dir}
	for _, d := range []string{"lists/partial", "archives/partial", "theirs", "served"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	sources, err := debian.ReadSources("/etc/apt")
	if err != nil {
		return nil, err
	}
	m.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(ctx, w, r) }))
	var theirs, served strings.Builder
	for i, s := range sources {
		if !s.IsOf(codename, keyring) {
			continue
		}
		fmt.Fprintf(&theirs, "deb [signed-by=%s] %s %s main\n", keyring, s.URI, s.Suite)
		fmt.Fprintf(&served, "deb [signed-by=%s] %s/%d %s main\n", keyring, m.server.URL, i, s.Suite)
	}
	for name, text := range map[string]string{"theirs": theirs.String(), "served": served.String()} {
		if err := os.WriteFile(filepath.Join(dir, name, "sources.list"), []byte(text), 0o644); err != nil {
			m.server.Close()
			return nil, err
		}
	}
	m.options = []string{"-o", "Dir::State::Lists=" + filepath.Join(dir, "lists"), "-o", "Dir::Cache::Archives=" + filepath.Join(dir, "archives"),
		"-o", "Dir::Etc::SourceList=" + filepath.Join(dir, "theirs", "sources.list"), "-o", "Dir::Etc::SourceParts=-", "-o", "Dir::Cache::PkgCache=", "-o", "Dir::Cache::SrcPkgCache="}
	return m, nil
}

const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// Sources is for boot.Config.Apt.
func (m *mirror) Sources() string { return filepath.Join(m.dir, "served") }

func (m *mirror) Close() { m.server.Close() }

func (m *mirror) apt(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "apt-get", append(append([]string{"-q"}, m.options...), args...)...)
	cmd.Dir = filepath.Join(m.dir, "archives")
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("apt-get %s: %w: %s", args[0], err, bytes.TrimSpace(said.Bytes()))
	}
	return out, err
}

// update has apt fetch the lists, once, and notes which file of apt's is which.
func (m *mirror) update(ctx context.Context) error {
	if m.files != nil {
		return nil
	}
	if _, err := m.apt(ctx, "update"); err != nil {
		return err
	}
	out, err := m.apt(ctx, "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(METAKEY) $(FILENAME)", "Created-By: Packages")
	if err != nil {
		return err
	}
	served, err := debian.ReadSources(m.Sources())
	if err != nil {
		return err
	}
	theirs, err := debian.ReadSources(filepath.Join(m.dir, "theirs"))
	if err != nil {
		return err
	}
	files := map[string]string{}
	for line := range strings.Lines(string(out)) {
		w := strings.Fields(line)
		if len(w) != 4 {
			continue
		}
		for i, s := range theirs {
			if s.URI+"/" != w[0] || s.Suite != w[1] {
				continue
			}
			base := strings.TrimPrefix(served[i].URI, m.server.URL) + "/dists/" + s.Suite + "/"
			files[base+w[2]] = w[3]
			// apt names the file by the address, of which the list's has more.
			release, _, _ := strings.Cut(w[3], "_dists_"+s.Suite+"_")
			files[base+"InRelease"] = release + "_dists_" + s.Suite + "_InRelease"
		}
	}
	m.files = files
	return nil
}

func (m *mirror) serve(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.update(ctx); err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	if file, ok := m.files[r.URL.Path]; ok {
		// Lists may be compressed on this machine, otherwise than on the mirror.
		out, err := exec.CommandContext(ctx, "/usr/lib/apt/apt-helper", "cat-file", file).Output()
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		_, _ = w.Write(out)
		return
	}
	base := path.Base(r.URL.Path)
	parts := strings.Split(strings.TrimSuffix(base, ".deb"), "_")
	if !strings.HasSuffix(base, ".deb") || len(parts) != 3 {
		http.NotFound(w, r)
		return
	}
	file := filepath.Join(m.dir, "archives", base)
	if _, err := os.Stat(file); err != nil {
		if _, err := m.apt(ctx, "download", parts[0]+"="+parts[1]); err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
	}
	http.ServeFile(w, r, file)
}
