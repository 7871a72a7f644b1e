package user

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// TestWhatLooksLikeAPathIsOne, and no registry is asked for it.
func TestWhatLooksLikeAPathIsOne(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.MkdirAll("repo", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, from := range []string{"none/", "./none", "../none", "/none", "~/none", "/none/of:1/"} {
		here, there, err := source(from)
		if dsec.ClassOf(err) != dsec.NotFound || !strings.Contains(err.Error(), dsec.Quote(from)+": no such") || here != nil || there != "" {
			t.Errorf("%s: %v, %q, %v", from, here, there, err)
		}
	}
	if _, _, err := source("none/"); !strings.HasSuffix(err.Error(), "no such directory") {
		t.Error(err)
	}
	for _, from := range []string{"repo", "repo/", "./repo", ".", filepath.Join(t.TempDir())} {
		if here, _, err := source(from); err != nil || here == nil || !here.IsDir() {
			t.Errorf("%s: %v, %v", from, here, err)
		}
	}
	for from, want := range map[string]string{"debian:12": "debian:12", "docker.io/library/debian:12": "docker.io/library/debian:12",
		"server:/srv/x/": "/srv/x/", "server:./x": "./x", "oci:/srv/x": "oci:/srv/x"} {
		if here, there, err := source(from); err != nil || here != nil || there != want {
			t.Errorf("%s: %v, %q, %v", from, here, there, err)
		}
	}
}

// TestBuildAndImportReadSourcesTheSameWay: neither gets as far as the server.
func TestBuildAndImportReadSourcesTheSameWay(t *testing.T) {
	c := layerBuild()
	_, build := buildFrom(t.Context(), c, nil, "./none", client.BuildOptions{})
	_, imported := importFrom(t.Context(), c, nil, "./none", "")
	if dsec.ClassOf(build) != dsec.NotFound || dsec.ClassOf(imported) != dsec.NotFound || build.Error() != imported.Error() {
		t.Errorf("%v, %v", build, imported)
	}
}
