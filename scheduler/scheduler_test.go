package scheduler

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func seeded() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

func node(id string, live, most int) Node {
	return Node{ID: dsec.NodeID(id), Tiers: []dsec.Tier{dsec.TierContainer}, Live: live, MaxLive: most}
}

func TestRefusalsNameTheirReason(t *testing.T) {
	dead, draining, full, vm := node("a", 0, 9), node("b", 0, 9), node("c", 8, 9), node("d", 0, 9)
	dead.Dead, draining.Draining, full.InFlight, vm.Tiers = true, true, 1, []dsec.Tier{dsec.TierMicroVM}
	refused := node("e", 0, 9)
	p, err := Place([]Node{dead, draining, full, vm, refused, node("f", 0, 9)},
		Request{Tier: dsec.TierContainer, Exclude: []dsec.NodeID{"e"}}, seeded())
	if err != nil || len(p.Order) != 1 || p.Order[0] != "f" {
		t.Fatalf("plan %+v, %v", p, err)
	}
	want := []string{"no heartbeat", "draining", "full: 9 of 9", "no tier container", "refused before"}
	for i, r := range p.Reasons {
		if r.Why != want[i] {
			t.Errorf("node %s: %q, want %q", r.Node, r.Why, want[i])
		}
	}
}

func TestErrorsTellWhatIsMissing(t *testing.T) {
	dead := node("a", 0, 9)
	dead.Dead = true
	for _, c := range []struct {
		nodes []Node
		tier  dsec.Tier
		class dsec.Class
	}{
		{nil, dsec.TierContainer, dsec.Unavailable},
		{[]Node{dead}, dsec.TierContainer, dsec.Unavailable},
		{[]Node{node("a", 0, 9)}, dsec.TierFullVM, dsec.Unsupported},
		{[]Node{node("a", 9, 9)}, dsec.TierContainer, dsec.ResourceExhausted},
	} {
		_, err := Place(c.nodes, Request{Tier: c.tier}, seeded())
		if dsec.ClassOf(err) != c.class {
			t.Errorf("%v: %v, want class %s", c.nodes, err, c.class)
		}
		if strings.Contains(err.Error(), "failed") {
			t.Errorf("text %q", err)
		}
	}
}

func TestPlanNamesOtherNodesForRefusals(t *testing.T) {
	var nodes []Node
	for i := range 20 {
		nodes = append(nodes, node(fmt.Sprintf("n%c", 'a'+i), 0, 100))
	}
	p, err := Place(nodes, Request{Tier: dsec.TierContainer}, seeded())
	if err != nil || len(p.Order) != MaxTries {
		t.Fatalf("plan %+v, %v", p, err)
	}
	seen := map[dsec.NodeID]bool{}
	for _, id := range p.Order {
		if seen[id] {
			t.Fatalf("node %s twice in %v", id, p.Order)
		}
		seen[id] = true
	}
}

// simulated is a cluster whose gateways see it once a second.
type simulated struct {
	truth []Node
	views [][]Node
	rnd   *rand.Rand
}

func simulate(nodes, gateways int) *simulated {
	s := &simulated{rnd: seeded(), views: make([][]Node, gateways)}
	for i := range nodes {
		most := []int{400, 800, 1600}[i%3]
		s.truth = append(s.truth, node(fmt.Sprintf("n%c%c", 'a'+i/26, 'a'+i%26), most*8/10, most))
	}
	return s
}

func (s *simulated) heartbeat() {
	for g := range s.views {
		s.views[g] = append([]Node(nil), s.truth...)
	}
}

// create places one sandbox through gateway g and returns the node, or -1.
func (s *simulated) create(g int) int {
	view := s.views[g]
	p, err := Place(view, Request{Tier: dsec.TierContainer}, s.rnd)
	if err != nil {
		return -1
	}
	for i := range view {
		if view[i].ID != p.Order[0] {
			continue
		}
		view[i].InFlight++
		if s.truth[i].Live >= s.truth[i].MaxLive {
			return -1
		}
		s.truth[i].Live++
		return i
	}
	return -1
}

// A burst of 5,000/s through four gateways with views one second old refuses
// nothing, keeps the nodes even, and never herds onto one.
func TestSimulatedBurstSpreads(t *testing.T) {
	s := simulate(60, 4)
	worst := 0
	for range 2 { // seconds
		s.heartbeat()
		for range 10 { // tenths
			got := map[int]int{}
			for i := range 250 {
				n := s.create(i % 4)
				if n < 0 {
					t.Fatal("a create was refused while there was room")
				}
				got[n]++
			}
			for _, c := range got {
				worst = max(worst, c)
			}
		}
	}
	mean, sd := 0.0, 0.0
	for _, n := range s.truth {
		mean += n.load() / float64(len(s.truth))
	}
	for _, n := range s.truth {
		sd += math.Pow(n.load()-mean, 2) / float64(len(s.truth))
	}
	if sd = math.Sqrt(sd); sd > 0.02 {
		t.Errorf("utilisation deviates by %.4f, want at most 0.02", sd)
	}
	if worst > 25 {
		t.Errorf("%d creates went to one node in 100 ms, mean 4.2", worst)
	}
}
