package apparmor

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
)

var update = flag.Bool("update", false, "write the golden files")

func text(t testing.TB, o Options) string {
	t.Helper()
	s, err := Text(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestTextIsGolden(t *testing.T) {
	for _, p := range confine.Profiles {
		for _, userns := range []bool{false, true} {
			o := Options{Name: Name(p, 7), Profile: p, Userns: userns}
			got := text(t, o)
			file := filepath.Join("testdata", fmt.Sprintf("%s-userns=%v.txt", p, userns))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil || string(want) != got {
				t.Errorf("%s differs (%v); if that is meant, run with -update and read the diff", file, err)
			}
			if again := text(t, o); again != got {
				t.Errorf("%s: two texts of one profile", p)
			}
		}
	}
}

func parser(t testing.TB) string {
	t.Helper()
	for _, p := range []string{"apparmor_parser", "/usr/sbin/apparmor_parser", "/sbin/apparmor_parser"} {
		if f, err := exec.LookPath(p); err == nil {
			return f
		}
	}
	t.Skip("no apparmor_parser (Debian: apparmor)")
	return ""
}

// The real parser compiles every profile, without warnings, to a policy.
func TestTheRealParserAcceptsEveryProfile(t *testing.T) {
	judge := parser(t)
	for _, p := range confine.Profiles {
		// Without a kernel that has AppArmor the features are those of the ABI.
		cmd := exec.Command(judge, "-Q", "-K", "-T", "--Werror", "-S", "-M", "/etc/apparmor.d/abi/3.0")
		cmd.Stdin = strings.NewReader(text(t, Options{Name: Name(p, 0), Profile: p}))
		var policy, said strings.Builder
		cmd.Stdout, cmd.Stderr = &policy, &said
		if err := cmd.Run(); err != nil || !strings.Contains(policy.String(), Name(p, 0)) {
			t.Errorf("%s: %v, %d bytes: %s", p, err, policy.Len(), said.String())
		}
	}
	cmd := exec.Command(judge, "-Q", "-K", "-T", "-S")
	cmd.Stdin = strings.NewReader("profile x { nonsense }")
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Errorf("the parser accepts anything: %s", out)
	}
}

func TestBadNamesAndProfilesAreInvalid(t *testing.T) {
	for _, o := range []Options{{Profile: confine.Build}, {Name: "a b", Profile: confine.Build}, {Name: "x", Profile: "nosuch"}, {Name: "1x", Profile: confine.Build},
		{Name: "x,\n  mount", Profile: confine.Build}, {Name: strings.Repeat("x", MaxName+1), Profile: confine.Build}, {Name: "X", Profile: confine.Build}} {
		if s, err := Text(o); !errors.Is(err, dsec.Invalid.Err()) || s != "" {
			t.Errorf("%+v: %v %q", o, err, s)
		}
	}
}

// Whatever the name, the rules are the same ones.
func FuzzNamesAddNoRules(f *testing.F) {
	for _, s := range []string{"dsec-build-1", "x {\n mount,\n}", "x}", "x#", "@{PROC}", "x//hat", "x\x00y", ":ns:x", "x flags=(complain)"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		const fixed = "dsec-fixed-0"
		want, err := Text(Options{Name: fixed, Profile: confine.Build})
		if err != nil {
			t.Fatal(err)
		}
		got, err := Text(Options{Name: name, Profile: confine.Build})
		if err != nil {
			return
		}
		a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
		if len(a) != len(b) {
			t.Fatalf("%q makes %d lines, not %d", name, len(b), len(a))
		}
		for i := range a {
			if b[i] != strings.Replace(a[i], fixed, name, 1) || strings.ContainsAny(name, " \t,{}()#@\"\\/*?[]^:=\x00") {
				t.Fatalf("%q: %q", name, b[i])
			}
		}
	})
}
