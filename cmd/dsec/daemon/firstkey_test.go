package daemon

import (
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec/internal/contexts"
)

func TestNoContextOfAnotherServerIsReplacedOrForgotten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "context.json")
	t.Setenv("DSEC_CONFIG", path)
	f, err := contexts.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	f.Contexts["local"] = contexts.Context{Socket: "/a/gateway.sock", APIKey: "k"}
	if got := freeName(f, "local", "/b/gateway.sock"); got != "local-2" {
		t.Errorf("another server's: %s", got)
	}
	if got := freeName(f, "local", "/a/gateway.sock"); got != "local" {
		t.Errorf("the same server's: %s", got)
	}
	f.Contexts["local-2"] = contexts.Context{Socket: "/b/gateway.sock", APIKey: "l"}
	f.Current = "local-2"
	if err := f.Save(path); err != nil {
		t.Fatal(err)
	}
	s := defaults()
	s.Run = "/b"
	if err := forgetContext(s); err != nil {
		t.Fatal(err)
	}
	if f, err = contexts.Load(path); err != nil || len(f.Contexts) != 1 || f.Contexts["local"].APIKey != "k" || f.Current != "" {
		t.Errorf("%+v %v", f, err)
	}
}
