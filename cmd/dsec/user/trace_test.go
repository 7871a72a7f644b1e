package user

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/client"
)

func TestPrintTrace(t *testing.T) {
	tr := client.LayerTrace{Digest: "sha256:0", DataSize: 100 << 20, Touched: 5 << 20, Expected: 1 << 20, Window: 2 * time.Minute, Recordings: 4, More: 3,
		Files: []client.TracedFile{{Path: "bin/sh", Size: 100 << 10, Touched: 100 << 10, Expected: 50 << 10, Count: 4},
			{Path: "etc/\x1b[2Jpasswd", Size: 10, Touched: 4096, Count: 1}}}
	var out bytes.Buffer
	if err := printTrace(&out, tr); err != nil {
		t.Fatal(err)
	}
	got := out.String()
	for _, want := range []string{"4, of at most 2m0s", "5.0%", "bin/sh", "4/4", "100.0%", "1/4", "and 3 more files"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "\x1b") {
		t.Errorf("a name of a file moves the cursor: %q", got)
	}
	if i, j := strings.Index(got, "bin/sh"), strings.Index(got, "passwd"); i > j {
		t.Errorf("not in order:\n%s", got)
	}
}
