package iam

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func newKeys(t *testing.T) (*Keys, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	k, err := NewKeys(t.Context(), &FileStore{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	return k, path
}

func TestKeyIsStoredHashedAndAuthenticates(t *testing.T) {
	k, path := newKeys(t)
	key, secret, err := k.Create(t.Context(), Request{Name: "ci", Project: "p1"})
	if err != nil || len(secret) != 45 {
		t.Fatal(secret, err)
	}
	b, _ := os.ReadFile(path)
	if strings.Contains(string(b), secret[5:]) {
		t.Fatal("the secret is in the store")
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v", st.Mode())
	}
	again, err := NewKeys(t.Context(), &FileStore{Path: path}) // a restart
	if err != nil {
		t.Fatal(err)
	}
	p, err := again.Authenticate(t.Context(), secret)
	if err != nil || p.Project != "p1" || p.Role != User || p.Name != "key:"+key.ID {
		t.Fatalf("%+v, %v", p, err)
	}
}

func TestWrongKeysAllLookAlike(t *testing.T) {
	k, _ := newKeys(t)
	now := time.Now()
	k.now = func() time.Time { return now }
	_, expired, _ := k.Create(t.Context(), Request{Lifetime: time.Second})
	revoked, revokedSecret, _ := k.Create(t.Context(), Request{})
	if ok, err := k.Revoke(t.Context(), revoked.ID); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := k.Revoke(t.Context(), revoked.ID); ok || err != nil {
		t.Fatal("a second revoke", ok, err)
	}
	now = now.Add(2 * time.Second)
	for _, s := range []string{"", "dsec_", NewSecret(), expired, revokedSecret, strings.ToUpper(expired), expired + "0"} {
		_, err := k.Authenticate(t.Context(), s)
		if dsec.ClassOf(err) != dsec.Unauthenticated || err.Error() != "authenticate: no valid API key" {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestChangesOfAnotherGatewayAreSeen(t *testing.T) {
	a, path := newKeys(t)
	now := time.Now()
	a.now = func() time.Time { return now }
	b, _ := NewKeys(t.Context(), &FileStore{Path: path})
	key, secret, _ := b.Create(t.Context(), Request{})
	now = now.Add(fresh + time.Second)
	if _, err := a.Authenticate(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	_, _ = b.Revoke(t.Context(), key.ID)
	now = now.Add(fresh + time.Second)
	if _, err := a.Authenticate(t.Context(), secret); err == nil {
		t.Fatal("a revoked key still works")
	}
}

func TestBadRequestsAreInvalid(t *testing.T) {
	k, _ := newKeys(t)
	for _, r := range []Request{{Role: "root"}, {Project: "A/b"}, {Lifetime: -1}, {Secret: "x"}, {Name: strings.Repeat("n", 200)}} {
		if _, _, err := k.Create(t.Context(), r); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func TestPeerIsKnownByUid(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { c, _ := net.Dial("unix", path); _ = c }()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p, err := PeerOf(c.(*net.UnixConn))
	if err != nil || int(p.UID) != os.Getuid() || int(p.Groups[0]) != os.Getgid() {
		t.Fatalf("%+v, %v", p, err)
	}
	if pr, err := (Local{Group: -1}).Identify(p); err != nil || pr.Role != Admin {
		t.Fatal(pr, err)
	}
}

func TestLocalCallersNeedToBeSomebody(t *testing.T) {
	stranger := Peer{UID: 54321, Groups: []uint32{54321}}
	if _, err := (Local{Group: -1}).Identify(stranger); dsec.ClassOf(err) != dsec.Unauthenticated {
		t.Fatal(err)
	}
	stranger.Groups = append(stranger.Groups, 777)
	if p, err := (Local{Group: 777}).Identify(stranger); err != nil || p.Project != DefaultProject {
		t.Fatal(p, err)
	}
}

var _ Store = (*FileStore)(nil)
