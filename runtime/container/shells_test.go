package container

import (
	"os"
	"path"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// linksIn counts the links of a namespace whose names begin so.
func linksIn(t testing.TB, ns *os.File, prefix string) (n int) {
	t.Helper()
	h, err := netlink.NewHandleAt(netns.NsHandle(int(ns.Fd())))
	must(t, err)
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return -1 // it changed meanwhile
	}
	for _, l := range links {
		if ok, _ := path.Match(prefix+"*", l.Attrs().Name); ok {
			n++
		}
	}
	return n
}

// fillForTest does what the filler does, with shells that are nothing but a shape.
func (p *shells) fillForTest() (thrown int) {
	if !p.low() {
		return 0
	}
	for {
		next, old, some := p.nextLocked()
		if !some {
			return thrown
		}
		if old != nil {
			thrown++
		}
		p.ready = append(p.ready, &shell{shape: next})
	}
}

// TestShellsAreOfWhatWasAskedLately: jobs that run at one time do not throw away each
// other's shells, and one that follows another gets all.
func TestShellsAreOfWhatWasAskedLately(t *testing.T) {
	none, list, big := shape{}, shape{linked: true}, shape{limits: dsec.Limits{Memory: 1 << 30}}
	const most = 16
	p := &shells{most: most, wake: make(chan struct{}, 1)}
	job := func(times int, shapes ...shape) (found, thrown int) {
		for i := range times {
			if p.take(shapes[i%len(shapes)]) != nil {
				found++
			}
			thrown += p.fillForTest()
			if len(p.ready) > most {
				t.Fatalf("%d shells, most is %d", len(p.ready), most)
			}
		}
		return found, thrown
	}
	if found, thrown := job(100, none); found != 99 || thrown != 0 {
		t.Errorf("one job: found %d of 100, %d thrown away", found, thrown)
	}
	if found, _ := job(100, none, list); found < 98 {
		t.Errorf("two jobs: found %d of 100", found)
	}
	if found, thrown := job(100, none, list); found != 100 || thrown != 0 {
		t.Errorf("two jobs, when they are known: found %d of 100, %d thrown away", found, thrown)
	}
	if a, b := p.countLocked(none), p.countLocked(list); a+b != len(p.ready) || a == 0 || b == 0 {
		t.Errorf("%d and %d of %d are ready", a, b, len(p.ready))
	}
	if found, thrown := job(100, list, list, none); found != 100 || thrown > 4 {
		t.Errorf("another mix: found %d of 100, %d thrown away", found, thrown)
	}
	if found, _ := job(100, big); found < 98 || p.countLocked(big) != len(p.ready) {
		t.Errorf("another job: found %d of 100, %d of %d ready", found, p.countLocked(big), len(p.ready))
	}
}

// TestALinkedShellIsForASandboxWithANetwork, and never for one without: that has
// loopback only.
func TestALinkedShellIsForASandboxWithANetwork(t *testing.T) {
	w := newWorld(t, linkedShells)
	w.prime(t)
	router, err := w.network.Router()
	must(t, err)
	defer router.Close()
	if n := linksIn(t, router, "v"); n != w.shells {
		t.Fatalf("%d links wait, want %d", n, w.shells)
	}
	live, err := w.network.Live(t.Context())
	must(t, err)
	if len(live) != 0 {
		t.Errorf("%v have a link", live)
	}
	shellOf := func(id dsec.SandboxID) string { return w.r.boxes.Reserve(id).record().Shell }
	none := w.create(t)
	if s := shellOf(none); s != "" {
		t.Errorf("one without a network is made from %s", s)
	}
	w.want(t, none, "ip -o link | grep -vc ' lo:'; ip -o link | grep -c ' lo:'; ip route | wc -l", "0\n1\n0\n")
	w.prime(t)
	for mode, is := range map[dsec.NetworkMode]string{dsec.NetworkAllow: "1\n", dsec.NetworkOpen: "0\n"} {
		eventually(t, "a linked shell is ready", func() bool {
			w.r.shells.mu.Lock()
			defer w.r.shells.mu.Unlock()
			return w.r.shells.countLocked(w.r.shapeOf(request(t, openNet).Spec)) > 0
		})
		id := w.create(t, func(r *runtime.Request) { r.Spec.Network = mode })
		if shellOf(id) == "" {
			t.Errorf("%s: made from no shell, and one was ready", mode)
		}
		// What no rule opens the router refuses; in this lab nobody else answers.
		w.want(t, id, "ip -4 addr show eth0 | grep -c inet; ip route | grep -c default", "1\n1\n")
		w.want(t, id, "echo | nc -w 1 8.8.8.8 80 2>&1 | grep -c refused; true", is)
		must(t, w.r.Stop(t.Context(), id, 0))
		_, err := w.r.Start(t.Context(), id)
		must(t, err)
		w.want(t, id, "ip -4 addr show eth0 | grep -c inet", "1\n")
		must(t, w.r.Destroy(t.Context(), id))
	}
	must(t, w.r.Destroy(t.Context(), none))
}

// TestANetworkMayBeClosedAtFirst: a sandbox whose first phase has none has a link, from a shell
// with one or of its own, by which nothing passes until a phase opens it.
func TestANetworkMayBeClosedAtFirst(t *testing.T) {
	w := newWorld(t, linkedShells)
	w.prime(t)
	closed, open := &dsec.NetworkPolicy{Mode: dsec.NetworkNone}, &dsec.NetworkPolicy{Mode: dsec.NetworkOpen}
	for range 3 { // more than there are shells
		id := w.create(t, func(r *runtime.Request) {
			r.Spec.Phases = []dsec.Phase{{Name: "a", Network: closed}, {Name: "b", Network: open}}
		})
		refused := func(want string) {
			t.Helper()
			w.want(t, id, "echo | nc -w 1 8.8.8.8 80 2>&1 | grep -ciE 'refused|unreachable|prohibited'; true", want)
		}
		w.want(t, id, "ip -4 addr show eth0 | grep -c inet", "1\n")
		refused("1\n")
		must(t, w.r.Stop(t.Context(), id, 0))
		_, err := w.r.Start(t.Context(), id)
		must(t, err)
		w.setPhase(t, id, "b")
		refused("0\n")
		must(t, w.r.Destroy(t.Context(), id))
	}
}
