package machine

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// eachWay runs a test on a machine that has its layers as plain files, and on one
// for each mechanism that brings them as they are read.
func eachWay(t *testing.T, test func(*testing.T, *site)) {
	ways := []string{"plain", "fuse"}
	if os.Getenv("DSEC_LONG") != "" {
		ways = append(ways, "pre-content") // whose own suite every run has
	}
	for _, how := range ways {
		t.Run(how, func(t *testing.T) {
			needs(t, how)
			dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
			if err != nil {
				t.Fatal(err)
			}
			if how == "plain" {
				test(t, &site{startIn(t, dir), false})
				return
			}
			test(t, &site{startWith(t, dir, "blobs: file://"+filepath.Join(t.TempDir(), "blobs")+"\n", "on_demand: "+how), true})
		})
	}
}

// site is a machine of eachWay.
type site struct {
	*host
	lazy bool // its layers come as they are read
}

// layer makes one of members of a tar, and of so much more that it is not fetched
// whole. Where layers come on demand nothing of it is here afterwards.
func (s *site) layer(tag string, members []byte) {
	s.t.Helper()
	l, err := s.UploadTree(s.t.Context(), bytes.NewReader(members), client.BuildOptions{Tag: tag})
	if err != nil {
		s.t.Fatal(err)
	}
	s.giveBack(dsec.LayerRef(l.Digest))
}

// giveBack has the data of a layer be elsewhere only.
func (s *site) giveBack(ref dsec.LayerRef) {
	s.t.Helper()
	if !s.lazy {
		return
	}
	if _, err := s.EvictLayer(s.t.Context(), ref); err != nil {
		s.t.Fatal(err)
	}
	if d := s.demand(ref); d.Here != 0 || d.Chunks == 0 {
		s.t.Fatalf("%s is here: %+v", ref, d)
	}
}

// came wants that some of a layer, and not all, was brought because it was read.
func (s *site) came(ref dsec.LayerRef) {
	s.t.Helper()
	if !s.lazy {
		return
	}
	if d := s.demand(ref); d.Stalls == 0 && hosted() || d.Here == 0 || d.Failures > 0 {
		s.t.Errorf("%s did not come as it was read: %+v", ref, d)
	}
}

// grown adds members to a tar.
func grown(t *testing.T, b []byte, add func(put func(name string, mode int64, body []byte))) []byte {
	t.Helper()
	const end = 1024 // two empty blocks
	var out bytes.Buffer
	out.Write(b[:max(0, len(b)-end)])
	w := tar.NewWriter(&out)
	add(func(name string, mode int64, body []byte) {
		err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(body)), Format: tar.FormatPAX})
		if err == nil {
			_, err = w.Write(body)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// noise is always the same for a name.
func noise(name string, n int) []byte {
	var seed [32]byte
	copy(seed[:], name)
	b := make([]byte, n)
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

// base is busybox with parts of noise, /opt/0 and so on, of half a MiB.
func base(t *testing.T, parts int) []byte {
	t.Helper()
	return grown(t, busybox(t), func(put func(string, int64, []byte)) {
		for i := range parts {
			put(fmt.Sprintf("opt/%d", i), 0o644, noise(fmt.Sprint(i), 512<<10))
		}
	})
}
