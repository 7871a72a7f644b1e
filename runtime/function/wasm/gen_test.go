package wasm

import (
	"bytes"
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write the module of the benchmark")

func TestTheModuleOfTheBenchmarkIsThis(t *testing.T) {
	const path = "../../../bench/hello.wasm"
	want := hello("hello\n")
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, want) {
		t.Errorf("run this test with -update: %v", err)
	}
}
