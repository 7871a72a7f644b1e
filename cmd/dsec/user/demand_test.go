package user

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/client"
)

func TestPrintDemand(t *testing.T) {
	all := []client.LayerDemand{
		{Digest: "sha256:0", Tags: []string{"a:1", "b"}, DataSize: 100 << 20, Chunks: 4, Here: 1, Touched: 3 << 20, Served: true, Requests: 7, Fetched: 2 << 20,
			Plain: 5 << 20, Stalls: 9, Stalled: 1500 * time.Millisecond, Failures: 2, LastFailure: "read \x1b[2Jobject"},
		{Digest: "sha256:1", DataSize: 10, Chunks: 1, Touched: -1},
		{Digest: "sha256:2", DataSize: 10, Chunks: 1, Here: 1},
	}
	var out bytes.Buffer
	if err := printDemand(&out, all); err != nil {
		t.Fatal(err)
	}
	got := out.String()
	for _, want := range []string{"a:1,b", "25.0%", "served", "3.0 MiB", "2.0 MiB → 5.0 MiB", "9, 1.5s", "not mounted", "plain files", "last failures\nsha256:0: read "} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "\x1b") {
		t.Errorf("an error moves the cursor: %q", got)
	}
}
