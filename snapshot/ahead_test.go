package snapshot

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/image"
)

// TestWhatWasReadAheadIsReadAgainIfItChanged changes a disk between the two
// readings.
func TestWhatWasReadAheadIsReadAgainIfItChanged(t *testing.T) {
	defer func(was time.Duration) { clockLag = was }(clockLag)
	for name, lag := range map[string]time.Duration{"all of it is settled": -time.Hour, "none is": time.Hour} {
		t.Run(name, func(t *testing.T) {
			clockLag = lag
			m := openMounts(t)
			base := treeLayer(t, fillBase)
			s := newStack(t, m, base)
			nasty(s)
			stale := strings.Repeat("stale content ", 1000)
			for _, f := range []string{"same", "rewritten", "removed", "grown", "replaced-file"} {
				s.write(f, stale+f)
			}
			must(t, os.Link(s.path("same"), s.path("same2")))
			var want map[string]string
			got, err := written(t, func(f image.Files) (Result, error) {
				k := NewPacking(f, Options{})
				must(t, k.ReadAhead(t.Context(), s.source()))
				if blocks := k.data.Blocks(); (blocks > 0) != (lag < 0) {
					t.Errorf("%d blocks read ahead", blocks)
				}
				s.write("rewritten", strings.Repeat("x", len(stale)+9))
				must(t, os.Remove(s.path("removed")))
				s.write("grown", stale+"grown and more")
				s.write("tmp", "new")
				must(t, os.Rename(s.path("tmp"), s.path("replaced-file")))
				s.write("added", "added")
				must(t, os.Truncate(s.path("sparse"), 6<<20))
				want = tree(t, s.path("."))
				must(t, k.Read(t.Context(), s.source()))
				return k.Write()
			})
			must(t, err)
			sameTrees(t, want, tree(t, newStack(t, m, base, got.Local).path(".")))
			for _, gone := range []string{"removed", "rewritten", "replaced-file"} {
				if bytes.Contains(got.data, []byte("stale content "+gone)) {
					t.Errorf("the old content of %s is in the data", gone)
				}
			}
		})
	}
}
