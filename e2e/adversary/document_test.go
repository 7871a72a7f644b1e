package adversary

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the document instead of comparing it")

const document = "../../docs/security-vectors.md"

// mark is where the part begins that is made from the table.
const mark = "<!-- Made from the table of e2e/adversary: go test ./e2e/adversary -run Document -update -->\n"

func TestDocumentIsTheTable(t *testing.T) {
	all, err := Vectors()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	head, tail, found := strings.Cut(string(text), mark)
	if !found {
		t.Fatalf("%s has no mark", document)
	}
	if want := Document(all); tail != want {
		if !*update {
			t.Fatalf("%s is not the table: run with -update", document)
		}
		if err := os.WriteFile(document, []byte(head+mark+want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestKnownLimitsAreFew: what works all the same is as few as the document says.
func TestKnownLimitsAreFew(t *testing.T) {
	all, err := Vectors()
	if err != nil {
		t.Fatal(err)
	}
	works := 0
	for _, v := range all {
		if v.Limit != "" {
			works++
		}
	}
	if len(all) < 200 || works > 2 {
		t.Errorf("of %d vectors %d work", len(all), works)
	}
}
