// Package contexts is the file in which a user keeps where gateways are and
// the keys for them: $DSEC_CONFIG, else $XDG_CONFIG_HOME/dsec/config.json, else
// ~/.config/dsec/config.json, readable by its owner only. libdsec reads the same
// file.
//
//	{"current": "local", "contexts": {"local": {"socket": "/run/dsec/gateway.sock", "api_key": "dsec_…"}}}
package contexts

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
)

// Context is one gateway: the path of its socket, or its URL.
type Context struct {
	Socket string `json:"socket,omitempty"`
	URL    string `json:"url,omitempty"`
	APIKey string `json:"api_key,omitempty"`
}

// File is the whole file.
type File struct {
	Current  string             `json:"current"`
	Contexts map[string]Context `json:"contexts"`
}

const maxFile = 1 << 20

// Path of the file of a user with this environment.
func Path(getenv func(string) string) string {
	if p := getenv("DSEC_CONFIG"); p != "" {
		return p
	}
	base := getenv("XDG_CONFIG_HOME")
	if base == "" {
		home := getenv("HOME")
		if home == "" {
			home = "/"
		}
		base = filepath.Join(home, ".config")
	}
	return filepath.Join(base, "dsec", "config.json")
}

// Load reads the file; a missing one is empty.
func Load(path string) (File, error) {
	f := File{Contexts: map[string]Context{}}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return f, nil
	}
	if err != nil {
		return f, dsec.E(dsec.Invalid, "read contexts", path, err)
	}
	if len(text) > maxFile {
		return f, dsec.Errorf(dsec.Invalid, "read contexts", path, "%d bytes, at most %d", len(text), maxFile)
	}
	if err := json.Unmarshal(text, &f); err != nil {
		return f, dsec.E(dsec.Invalid, "read contexts", path, err)
	}
	if f.Contexts == nil {
		f.Contexts = map[string]Context{}
	}
	return f, nil
}

// Save replaces the file; whoever reads meanwhile sees the old or the new one.
func (f File) Save(path string) error {
	text, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return dsec.E(dsec.Internal, "write contexts", path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return dsec.E(dsec.PermissionDenied, "write contexts", path, err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".config-") // mode 0600
	if err != nil {
		return dsec.E(dsec.PermissionDenied, "write contexts", path, err)
	}
	_, err = tmp.Write(append(text, '\n'))
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
		return dsec.E(dsec.Internal, "write contexts", path, err)
	}
	return nil
}

// Pick returns the context of a name: as given, $DSEC_CONTEXT, or the current one.
func (f File) Pick(name string, getenv func(string) string) (Context, error) {
	if name == "" {
		name = getenv("DSEC_CONTEXT")
	}
	if name == "" {
		name = f.Current
	}
	c, ok := f.Contexts[name]
	if !ok {
		return Context{}, dsec.Errorf(dsec.NotFound, "find context", dsec.Quote(name), "there is no such context")
	}
	return c, nil
}
