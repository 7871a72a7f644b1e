package demand

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/opendsec/dsec"
)

// images in a registry that takes 20 ms for each answer.
type hub struct {
	host  string
	blobs map[string]string // image of bench/images → path of its blob
}

func newHub(t *testing.T) *hub {
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithBlobHandler(registry.NewDiskBlobHandler(t.TempDir())))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(latency) // what the network takes
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return &hub{host: strings.TrimPrefix(srv.URL, "http://"), blobs: map[string]string{}}
}

// push makes an image of the layers of an environment.
func (h *hub) push(t *testing.T, w *world, e env, i int) string {
	t.Helper()
	ref, err := name.ParseReference(fmt.Sprintf("%s/env%d:1", h.host, i))
	must(t, err)
	var layers []v1.Layer
	for _, l := range e.Layers {
		zipped(t, filepath.Join(w.dir, l+".tar"))
		made, err := tarball.LayerFromFile(filepath.Join(w.dir, l+".tar.gz"))
		must(t, err)
		d, err := made.Digest()
		must(t, err)
		layers, h.blobs[l] = append(layers, made), fmt.Sprintf("http://%s/v2/env%d/blobs/%s", h.host, i, d)
	}
	img, err := mutate.AppendLayers(empty.Image, layers...)
	must(t, err)
	must(t, remote.Write(ref, img))
	return ref.String()
}

func (h *hub) open(ctx context.Context, layer string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.blobs[layer], nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("get %s: %s", h.blobs[layer], resp.Status)
	}
	return resp.Body, nil
}

// neverSeen starts images that no machine has seen by their references,
// beside pulling and unpacking them.
func (w *world) neverSeen(t *testing.T) {
	h := newHub(t)
	text := "| program | layers | dsec: ready | done | pull, unpack, runc: ready | done | ready: ratio | done: ratio |\n|---|---|---|---|---|---|---|---|"
	for i, e := range w.envs {
		ref := h.push(t, w, e, i)
		t.Run(e.Name, func(t *testing.T) {
			m := boot(t, w.URL(fmt.Sprint("never", i)), how())
			seen := e
			seen.refs = []dsec.LayerRef{dsec.LayerRef(ref)}
			ours := m.burst(w, "never seen", []env{seen})
			m.Down()
			theirs := w.unpacked(t, h.open, []env{e})
			text += fmt.Sprintf("\n| %s | %d | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f |", e.Name, len(e.Layers), ours.ready[0].Seconds(), ours.last().Seconds(),
				theirs.ready[0].Seconds(), theirs.last().Seconds(), ours.ready[0].Seconds()/theirs.ready[0].Seconds(), ours.last().Seconds()/theirs.last().Seconds())
		})
	}
	t.Log("\n" + text)
}
