package accounts

import (
	"slices"
	"strings"
	"testing"
)

func TestB16UsersByNameAndNumber(t *testing.T) {
	a := Files{
		Passwd: []byte("root:x:0:0::/root:/bin/sh\nbroken\nuser:x:1000:100::/home/user:/bin/sh\nodd:x:1001:1001::relative:/bin/sh\nbig:x:99999:1::/:/\n"),
		Group:  []byte("root:x:0:\nusers:x:100:\nwheel:x:10:root,user\ndocker:x:999:user\nempty:x:5\n"),
	}
	for _, c := range []struct {
		user string
		want Identity
	}{
		{"", Identity{0, 0, []uint32{0, 10}, "root", "/root"}},
		{"root", Identity{0, 0, []uint32{0, 10}, "root", "/root"}},
		{"user", Identity{1000, 100, []uint32{100, 10, 999}, "user", "/home/user"}},
		{"1000", Identity{1000, 100, []uint32{100, 10, 999}, "user", "/home/user"}},
		{"user:docker", Identity{1000, 999, nil, "user", "/home/user"}},
		{"1000:7", Identity{1000, 7, nil, "user", "/home/user"}},
		{"4321", Identity{4321, 0, []uint32{0}, "4321", "/"}},
		{"4321:4322", Identity{4321, 4322, nil, "4321", "/"}},
		{"odd", Identity{1001, 1001, []uint32{1001}, "odd", "/"}},
	} {
		got, err := a.Lookup(c.user)
		if err != nil || got.UID != c.want.UID || got.GID != c.want.GID || !slices.Equal(got.Groups, c.want.Groups) ||
			got.Name != c.want.Name || got.Home != c.want.Home {
			t.Errorf("%q: %+v, %v, want %+v", c.user, got, err, c.want)
		}
	}
	for _, bad := range []string{"nonexistent", "nonexistent:0", "user:nogroup", "70000", "big", ":5", "user:", "-1"} {
		if who, err := a.Lookup(bad); err == nil {
			t.Errorf("%q: %+v", bad, who)
		} else if name := strings.Split(bad, ":"); !strings.Contains(err.Error(), `"`) {
			t.Errorf("%q: the error does not name it: %v (%v)", bad, err, name)
		}
	}
	var none Files
	if who, err := none.Lookup(""); err != nil || who.Home != "/root" || who.Name != "root" {
		t.Errorf("without files: %+v, %v", who, err)
	}
}

func TestB8EnvironmentOrder(t *testing.T) {
	got := Environment(Identity{Name: "user", Home: "/home/user"}, true, "C.UTF-8",
		[]string{"PATH=/img", "A=image", "HOME=/img", "=x", "novalue"}, map[string]string{"A": "spec", "B": "spec"}, map[string]string{"B": "exec"})
	want := []string{"A=spec", "B=exec", "HOME=/home/user", "LANG=C.UTF-8", "LOGNAME=user", "PATH=/img", "TERM=xterm-256color", "USER=user"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	got = Environment(Identity{Name: "root", Home: "/root"}, false, "", nil, nil)
	if !slices.Contains(got, "PATH="+DefaultPath) || slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, "TERM=") }) {
		t.Errorf("got %q", got)
	}
}

func FuzzLookupUser(f *testing.F) {
	f.Add([]byte("root:x:0:0::/root:/bin/sh\n"), []byte("root:x:0:a,b\n"), "root:root")
	f.Fuzz(func(t *testing.T, passwd, group []byte, user string) {
		a := Files{passwd, group}
		who, err := a.Lookup(user)
		if err == nil && (who.UID >= IDs || who.GID >= IDs || len(who.Groups) > maxGroups) {
			t.Errorf("%q: %+v", user, who)
		}
	})
}
