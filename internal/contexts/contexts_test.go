package contexts

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/opendsec/dsec"
)

func env(m map[string]string) func(string) string { return func(k string) string { return m[k] } }

func TestWhatIsSavedIsLoadedAndPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "config.json")
	f := File{Current: "local", Contexts: map[string]Context{"local": {Socket: "/s", APIKey: "k"}, "far": {URL: "https://x"}}}
	for range 2 {
		if err := f.Save(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Load(path)
	if err != nil || !reflect.DeepEqual(got, f) {
		t.Fatalf("%+v, %v", got, err)
	}
	if st, _ := os.Stat(path); st.Mode() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	for name, want := range map[string]string{"": "/s", "local": "/s"} {
		if c, err := got.Pick(name, env(nil)); err != nil || c.Socket != want {
			t.Errorf("%q: %+v, %v", name, c, err)
		}
	}
	if c, err := got.Pick("", env(map[string]string{"DSEC_CONTEXT": "far"})); err != nil || c.URL != "https://x" {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := got.Pick("none", env(nil)); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("got %v", err)
	}
}

func TestMissingIsEmptyAndBrokenIsInvalid(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.json")
	if f, err := Load(path); err != nil || len(f.Contexts) != 0 {
		t.Errorf("%+v, %v", f, err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); dsec.ClassOf(err) != dsec.Invalid {
		t.Errorf("got %v", err)
	}
}

func TestPathFollowsTheEnvironment(t *testing.T) {
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"DSEC_CONFIG": "/x", "HOME": "/h"}, "/x"},
		{map[string]string{"XDG_CONFIG_HOME": "/g", "HOME": "/h"}, "/g/dsec/config.json"},
		{map[string]string{"HOME": "/h"}, "/h/.config/dsec/config.json"},
	} {
		if got := Path(env(c.env)); got != c.want {
			t.Errorf("%v: %s", c.env, got)
		}
	}
}
