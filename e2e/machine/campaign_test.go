package machine

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// campaignTime is how long policies are flipped.
func campaignTime() time.Duration {
	if long {
		return 10 * time.Minute
	}
	return 25 * time.Second
}

const (
	flippers     = 4    // sandboxes; every other one has phases
	basePort     = 2000 // of the first; each has its own, which tells whose a packet is
	killsOfAgent = 7 * time.Second
	phaseCount   = 5
)

var servers = []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("198.51.100.3")}

// period is how long a policy was in force for certain: from its acknowledgement to
// the call that asked for another.
type period struct {
	from, to   time.Time
	open       map[target]bool
	generation uint64
}

// flipper is a sandbox whose policy changes, by itself or with its phase.
type flipper struct {
	id      dsec.SandboxID
	targets []target
	phases  []dsec.Phase
	opens   []map[target]bool // of each phase
	at      int               // in which of them it is, or will be
	moving  bool              // a move to that one was not acknowledged
	random  *rand.Rand
	periods []period
	failed  int // changes that nobody acknowledged
}

// TestRandomPoliciesAndPhasesUnderTraffic: whatever policy or phase is acknowledged,
// and whoever is killed, nothing that it denies comes out of the sandbox, and what it
// opens does.
func TestRandomPoliciesAndPhasesUnderTraffic(t *testing.T) {
	t.Parallel()
	l := newLab(t, servers)
	for i := range flippers {
		l.serve(t, basePort+i)
	}
	stop := l.arrivals(t)
	h := startBinary(t, l.binary(t), stateDir(t), "")
	h.image("hammer", hammer(t))
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	all := make([]*flipper, flippers)
	for i := range all {
		all[i] = newFlipper(h, i, rand.New(rand.NewPCG(seed, uint64(i))))
	}
	ctx, cancel := context.WithTimeout(t.Context(), campaignTime())
	defer cancel()
	var flips sync.WaitGroup
	for _, f := range all {
		flips.Go(func() { f.flip(ctx, h) })
	}
	kills := 0
	for random := rand.New(rand.NewPCG(seed, flippers)); ctx.Err() == nil; {
		select {
		case <-ctx.Done():
		case <-time.After(killsOfAgent/2 + time.Duration(random.Int64N(int64(killsOfAgent)))): // any moment will do
			h.Kill("node")
			kills++
		}
	}
	flips.Wait()
	for _, f := range all {
		f.converges(t, h)
	}
	judge(t, all, stop(), kills)
}

func newFlipper(h *host, i int, random *rand.Rand) *flipper {
	h.t.Helper()
	f := &flipper{random: random}
	argv := []string{"/hammer"}
	for _, a := range servers {
		for _, proto := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			f.targets = append(f.targets, target{a, proto, uint16(basePort + i)})
			argv = append(argv, fmt.Sprintf("%s:%v:%d", protocol(proto), a, basePort+i))
		}
	}
	if i%2 == 0 {
		f.id = h.create(func(s *dsec.Spec) { s.Image, s.Command, s.Network = "hammer", argv, dsec.NetworkAllow })
		return f
	}
	for i := range phaseCount {
		p, open := f.policy()
		f.phases = append(f.phases, dsec.Phase{Name: fmt.Sprint("p", i), Network: &p})
		f.opens = append(f.opens, open)
		for before := range i {
			f.phases[i].Back = append(f.phases[i].Back, fmt.Sprint("p", before))
		}
	}
	f.opens[0] = map[target]bool{}
	for _, to := range f.targets { // so that each is open now and then
		f.opens[0][to] = true
	}
	f.phases[0].Network = f.all()
	f.id = h.create(func(s *dsec.Spec) { s.Image, s.Phases = "hammer", f.phases })
	// A service lives on, with its connections, from phase to phase.
	if _, err := h.Exec(h.t.Context(), f.id, process.Spec{Argv: argv, Service: true}); err != nil {
		h.t.Fatal(err)
	}
	return f
}

// all is the policy that opens every target.
func (f *flipper) all() *dsec.NetworkPolicy {
	p := &dsec.NetworkPolicy{Mode: dsec.NetworkAllow}
	for _, to := range f.targets {
		p.Allow = append(p.Allow, dsec.NetworkRule{CIDR: to.addr.String(), Protocol: protocol(to.proto), Ports: []string{strconv.Itoa(int(to.port))}})
	}
	return p
}

func protocol(n uint8) string {
	if n == unix.IPPROTO_TCP {
		return "tcp"
	}
	return "udp"
}

// policy opens some of the targets; sometimes none, sometimes with an own rule each,
// sometimes with one that says more.
func (f *flipper) policy() (p dsec.NetworkPolicy, open map[target]bool) {
	p.Mode, open = dsec.NetworkAllow, map[target]bool{}
	if f.random.IntN(8) == 0 {
		p.Mode = dsec.NetworkNone
		return p, open
	}
	for _, to := range f.targets {
		if f.random.IntN(2) == 0 {
			continue
		}
		r := dsec.NetworkRule{CIDR: to.addr.String(), Protocol: protocol(to.proto), Ports: []string{strconv.Itoa(int(to.port))}}
		if f.random.IntN(3) == 0 {
			r.Ports = []string{"1-" + r.Ports[0]}
		}
		p.Allow, open[to] = append(p.Allow, r), true
	}
	return p, open
}

// flip changes the policy until ctx ends.
func (f *flipper) flip(ctx context.Context, h *host) {
	for ctx.Err() == nil {
		f.set(ctx, h)
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(f.random.IntN(200)) * time.Millisecond): // how long a policy is in force
		}
	}
}

func (f *flipper) set(ctx context.Context, h *host) {
	change, open := f.next(ctx, h)
	if n := len(f.periods); n > 0 && f.periods[n-1].to.IsZero() {
		f.periods[n-1].to = time.Now()
	}
	sb, err := change()
	if err != nil {
		f.failed++
		return
	}
	f.periods = append(f.periods, period{from: time.Now(), open: open, generation: f.generation(sb)})
}

// next is a change, and what is open after it.
func (f *flipper) next(ctx context.Context, h *host) (change func() (client.Sandbox, error), open map[target]bool) {
	if f.phases == nil {
		p, open := f.policy()
		return func() (client.Sandbox, error) { return h.SetNetwork(ctx, f.id, p) }, open
	}
	// One that nobody acknowledged may have begun, and goes on with itself only.
	if to := f.random.IntN(phaseCount - 1); !f.moving {
		f.at = (f.at + 1 + to) % phaseCount
	}
	return func() (client.Sandbox, error) {
		sb, err := h.SetPhase(ctx, f.id, f.phases[f.at].Name)
		f.moving = err != nil
		return sb, err
	}, f.opens[f.at]
}

// generation is of what changes.
func (f *flipper) generation(sb client.Sandbox) uint64 {
	if f.phases != nil && sb.Phase != nil {
		return sb.Phase.Generation
	}
	return sb.Network.Generation
}

// converges wants that the next policy is in force, and the one that is told.
func (f *flipper) converges(t *testing.T, h *host) {
	t.Helper()
	f.set(t.Context(), h)
	last := f.periods[len(f.periods)-1]
	sb, err := h.Get(t.Context(), f.id)
	if err != nil || sb.Network == nil || f.generation(sb) != last.generation || sb.State != dsec.Running {
		t.Errorf("%s: %+v, %v; want generation %d", f.id, sb.Network, err, last.generation)
	}
	if !slices.IsSortedFunc(f.periods, func(a, b period) int { return int(a.generation) - int(b.generation) }) {
		t.Errorf("%s: its generations do not grow", f.id)
	}
	time.Sleep(100 * time.Millisecond) // for what is sent in the last one
	f.periods[len(f.periods)-1].to = time.Now()
}

// judge holds every packet against the policy that was in force.
func judge(t *testing.T, all []*flipper, came []arrival, kills int) {
	t.Helper()
	denied, open, between := 0, 0, 0
	for _, f := range all {
		seen := map[target]int{}
		for _, a := range came {
			if a.port != f.targets[0].port {
				continue
			}
			i := slices.IndexFunc(f.periods, func(p period) bool { return !a.at.Before(p.from) && a.at.Before(p.to) })
			switch {
			case i < 0:
				between++
			case f.periods[i].open[a.target]:
				open++
				seen[a.target]++
			default:
				denied++
				if denied < 20 {
					t.Errorf("%s %v:%d came %v after generation %d, which denies it, was acknowledged", protocol(a.proto), a.addr, a.port,
						a.at.Sub(f.periods[i].from), f.periods[i].generation)
				}
			}
		}
		for _, to := range f.targets {
			if seen[to] == 0 {
				t.Errorf("%s %v:%d was open now and then, and nothing came", protocol(to.proto), to.addr, to.port)
			}
		}
		t.Logf("%s, %d phases: %d changes acknowledged, %d not", f.id, len(f.phases), len(f.periods), f.failed)
	}
	t.Logf("%d packets that were open, %d in the middle of a change, %d that were denied; the agent was killed %d times", open, between, denied, kills)
	if kills == 0 {
		t.Error("the agent was never killed")
	}
}

// hammer is an image of that program alone.
func hammer(t *testing.T) []byte {
	t.Helper()
	file := filepath.Join(t.TempDir(), "hammer")
	cmd := exec.Command("go", "build", "-o", file, "./testdata/hammer")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build hammer: %v\n%s", err, out)
	}
	prog, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "hammer", Mode: 0o755, Typeflag: tar.TypeReg, Size: int64(len(prog))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(prog); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
