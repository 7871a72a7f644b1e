package adversary

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/e2e/up"
	"github.com/opendsec/dsec/process"
)

// long says that the full lengths are wanted.
var long = os.Getenv("DSEC_LONG") != ""

// Built once by TestMain: the dsec of this tree, and the program of all techniques.
var binary, attack string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if os.Geteuid() != 0 {
		fmt.Println("skipped: only root can make sandboxes, and this is uid", os.Geteuid())
		return 0
	}
	var remove func()
	var err error
	if binary, remove, err = up.Build("../.."); err != nil {
		fmt.Println(err)
		return 1
	}
	defer remove()
	attack = filepath.Join(filepath.Dir(binary), "attack")
	build := exec.Command("go", "build", "-o", attack, "./attack")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Printf("build attack: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// TestAdversary has one machine for everything that is tried on one.
func TestAdversary(t *testing.T) {
	h := start(t, "adv")
	for _, part := range []struct {
		name string
		test func(*testing.T, *host)
	}{
		{"NothingOfItWorksInside", nothingOfItWorksInside},
		{"NothingIsReached", nothingIsReached},
		{"TheGatewayReachesNothingForOthers", theGatewayReachesNothingForOthers},
		{"TheHelperIsNeverInHand", theHelperIsNeverInHand},
		{"NobodyElseIsBecome", nobodyElseIsBecome},
		{"TheSecondWallHolds", theSecondWallHolds},
		{"LinksThatFlipLeadNowhere", linksThatFlipLeadNowhere},
		{"HostileTarsStayInsideTheSandbox", hostileTarsStayInsideTheSandbox},
		{"HostileLayersReachNothing", hostileLayersReachNothing},
		{"WhatASandboxSendsStaysBelow", whatASandboxSendsStaysBelow},
		{"NamesCommandNoTerminal", namesCommandNoTerminal},
		{"DamageStaysWithWhoDoesIt", damageStaysWithWhoDoesIt},
		{"WhoEndsItsOwnSystemIsToBlame", whoEndsItsOwnSystemIsToBlame},
	} {
		t.Run(part.name, func(t *testing.T) { part.test(t, h) })
	}
}

// host is a machine that serves, shared by all parts of the test.
type host struct {
	*up.Machine
	t *testing.T
}

func start(t *testing.T, name string) *host {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	conf := "gateway: {listen: ''}\nnode: {disk_pool: 8GiB, max_live: 200, uid_ranges: 400, uid_base: 805306368}\n"
	h := &host{up.Start(t, binary, name, dir, conf), t}
	if _, err := h.UploadTree(t.Context(), bytes.NewReader(hostileTree(t)), client.BuildOptions{Tag: "hostile"}); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *host) create(t *testing.T, change func(*dsec.Spec)) dsec.SandboxID {
	t.Helper()
	s := dsec.Spec{Tier: dsec.TierContainer, Image: "hostile", Limits: dsec.Limits{CPU: 1, Memory: 128 << 20, Pids: 64, Disk: 64 << 20}}
	if change != nil {
		change(&s)
	}
	sb, err := h.Create(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return sb.ID
}

// said is what a technique came to.
type said struct {
	process.Result
	text string // the last line
	exec string
}

// try runs a technique as a user in a sandbox.
func (h *host) try(t *testing.T, id dsec.SandboxID, user, name string, env map[string]string) said {
	t.Helper()
	p, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/attack", name}, User: user, Cwd: "/tmp", Env: env, Timeout: time.Minute})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	r, err := p.Wait(t.Context())
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	stdout, stderr, err := p.Kept(t.Context())
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	text := strings.TrimSpace(string(stdout.Tail))
	if text == "" {
		text = strings.TrimSpace(string(stdout.Head))
	}
	if i := strings.LastIndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	if text == "" {
		text = strings.TrimSpace(string(stderr.Head))
	}
	return said{r, text, p.ID}
}

// eventually polls, because what it looks at is another process's.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(up.Within); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", up.Within, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
