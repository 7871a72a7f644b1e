// Package bpf puts plans of netpolicy in force in the kernel, at the host's end of
// each sandbox's link. Its two programs judge every packet there, whatever made
// it: by the pins of names, then by the longest prefix of the link's plan. What a
// plan opens gets a mark, and whoever forwards lets nothing else pass; what it
// refuses gets another one, so that it can be told. docs/formats/netpolicy.md has
// the maps.
//
// A plan changes in one step: all of the new one is there before the link is
// pointed at it. Plans that are equal are there once. Programs and maps stay in
// force while nobody runs this code, until the link goes.
package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/netpolicy"
)

var (
	_ netpolicy.Gate   = (*Gate)(nil)
	_ netpolicy.Binder = (*Gate)(nil)
)

// Gate implements netpolicy.Gate for the links of one network namespace. Its
// methods may be called at one time; for one link, one after the other.
type Gate struct {
	maps     *Maps
	owns     bool // the maps end with it
	from, to *ebpf.Program

	mu    sync.Mutex
	next  uint32
	plans map[string]*plan // by content
	links map[uint32]*linked
}

type plan struct {
	id    uint32
	keys  [][]byte
	links int
	key   string
}

type linked struct {
	addr       netip.Addr
	plan       *plan
	generation uint64
	pins       map[netip.Addr]bool
	pinned     bool   // something was, since Apply waited
	group      uint64 // the control group that is bound to it; 0: none
}

// New loads the programs over maps, and takes over what is in force in them.
func New(m *Maps) (*Gate, error) {
	g := &Gate{maps: m, plans: map[string]*plan{}, links: map[uint32]*linked{}}
	var err error
	if g.from, err = ebpf.NewProgram(fromSandbox.program(m)); err != nil {
		return nil, fmt.Errorf("load %s: %w", fromSandbox.name, err)
	}
	if g.to, err = ebpf.NewProgram(toSandbox.program(m)); err != nil {
		return nil, errors.Join(fmt.Errorf("load %s: %w", toSandbox.name, err), g.from.Close())
	}
	if err := g.adopt(); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// Close lets go of the programs. They stay where they are attached.
func (g *Gate) Close() error {
	err := errors.Join(g.from.Close(), g.to.Close())
	if g.owns {
		g.maps.Close()
	}
	return err
}

// adopt reads what is in force. Plans that no link has are of who was killed while
// he made them.
func (g *Gate) adopt() error {
	byID := map[uint32]*plan{}
	content := map[uint32]map[string]string{}
	var key, value []byte
	for it := g.maps.Plans.Iterate(); ; {
		if !it.Next(&key, &value) {
			if err := it.Err(); err != nil {
				return fmt.Errorf("read plans: %w", err)
			}
			break
		}
		id := binary.NativeEndian.Uint32(key[4:])
		if byID[id] == nil {
			byID[id], content[id] = &plan{id: id}, map[string]string{}
		}
		byID[id].keys = append(byID[id].keys, append([]byte(nil), key...))
		content[id][prefixOf(key)] = string(value)
		g.next = max(g.next, id)
	}
	for it := g.maps.Links.Iterate(); ; {
		var link uint32
		if !it.Next(&link, &value) {
			if err := it.Err(); err != nil {
				return fmt.Errorf("read links: %w", err)
			}
			break
		}
		id := binary.NativeEndian.Uint32(value[linkPlan:])
		p := byID[id]
		if p == nil {
			p = &plan{id: id}
			byID[id] = p
			g.next = max(g.next, id)
		}
		p.links++
		v4, _ := netip.AddrFromSlice(value[linkAddr:][:4])
		g.links[link] = &linked{addr: v4, plan: p, generation: binary.NativeEndian.Uint64(value[linkGen:]), pins: map[netip.Addr]bool{}, pinned: true}
	}
	if err := errors.Join(g.adoptPins(), g.adoptGroups()); err != nil {
		return err
	}
	for id, p := range byID {
		if p.links == 0 {
			if err := g.remove(p); err != nil {
				return err
			}
			continue
		}
		p.key = contentKey(content[id])
		g.plans[p.key] = p
	}
	return nil
}

// Add implements netpolicy.Gate.
func (g *Gate) Add(link int, a netip.Addr, of netpolicy.Plan) error {
	index := uint32(link)
	if err := g.maps.Counts.Update(index, make([]byte, countSize), ebpf.UpdateAny); err != nil {
		return fmt.Errorf("count packets of link %d: %w", link, err)
	}
	g.mu.Lock()
	g.links[index] = &linked{addr: a, pins: map[netip.Addr]bool{}}
	g.mu.Unlock()
	_, err := g.Apply(link, of)
	return err
}

// Attach implements netpolicy.Gate.
func (g *Gate) Attach(link int) error { return attach(link, g.from, g.to) }

// Generation implements netpolicy.Gate.
func (g *Gate) Generation(link int) uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l := g.links[uint32(link)]; l != nil {
		return l.generation
	}
	return 0
}

// Apply implements netpolicy.Gate.
func (g *Gate) Apply(link int, of netpolicy.Plan) (generation uint64, err error) {
	old, pinned, generation, err := g.point(link, of)
	if err != nil {
		return 0, fmt.Errorf("put plan in force on link %d: %w", link, err)
	}
	if old == nil {
		return generation, nil
	}
	if len(old.keys) > 0 || pinned { // else nothing was open
		if err := settle(); err != nil {
			return 0, err
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return generation, g.releaseLocked(old)
}

// point points a link at a plan, and returns the one before.
func (g *Gate) point(link int, of netpolicy.Plan) (old *plan, pinned bool, generation uint64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.links[uint32(link)]
	if l == nil {
		return nil, false, 0, errors.New("no sandbox has it")
	}
	p, err := g.planLocked(of)
	if err != nil {
		return nil, false, 0, err
	}
	if err := g.maps.Links.Update(uint32(link), encodeLink(p.id, l.addr, l.generation+1), ebpf.UpdateAny); err != nil {
		return nil, false, 0, errors.Join(err, g.releaseLocked(p))
	}
	old, l.plan, l.generation = l.plan, p, l.generation+1
	pinned, l.pinned = l.pinned, len(l.pins) > 0
	return old, pinned, l.generation, nil
}

// settle returns when every packet that was being judged has been.
func settle() error {
	if _, _, e := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); e != 0 {
		return fmt.Errorf("wait for packets under way: %w", e)
	}
	return nil
}

// membarrierGlobal is an RCU grace period, after which no program runs that began
// before it.
const membarrierGlobal = 1

// planLocked finds an equal plan, or writes a new one.
func (g *Gate) planLocked(of netpolicy.Plan) (*plan, error) {
	content := map[string]string{}
	p := &plan{id: g.next + 1}
	for _, n := range of.Prefixes {
		value := make([]byte, openSize)
		encodeOpen(value, n.Open)
		key := encodePlanKey(p.id, n.Net)
		p.keys = append(p.keys, key)
		content[prefixOf(key)] = string(value)
	}
	p.key = contentKey(content)
	if same := g.plans[p.key]; same != nil {
		same.links++
		return same, nil
	}
	g.next++
	for _, key := range p.keys {
		if err := g.maps.Plans.Update(key, []byte(content[prefixOf(key)]), ebpf.UpdateAny); err != nil {
			return nil, errors.Join(fmt.Errorf("write plan: %w", err), g.remove(p))
		}
	}
	p.links = 1
	g.plans[p.key] = p
	return p, nil
}

func (g *Gate) releaseLocked(p *plan) error {
	if p.links--; p.links > 0 {
		return nil
	}
	delete(g.plans, p.key)
	return g.remove(p)
}

func (g *Gate) remove(p *plan) error {
	for _, key := range p.keys {
		if err := g.maps.Plans.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove plan: %w", err)
		}
	}
	return nil
}

// Sweep implements netpolicy.Gate. The pins of links go with them.
func (g *Gate) Sweep(live map[int]bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	last := uint32(0)
	for link := range live {
		last = max(last, uint32(link))
	}
	for link, l := range g.links {
		if live[int(link)] || link > last { // made since the list was
			continue
		}
		if err := g.forgetLocked(link, l); err != nil {
			return err
		}
	}
	return nil
}

func (g *Gate) forgetLocked(link uint32, l *linked) error {
	for a := range l.pins {
		if err := g.unpin(link, a); err != nil {
			return err
		}
	}
	if l.group != 0 {
		if err := g.unbind(link, l.group); err != nil {
			return err
		}
	}
	for _, m := range []*ebpf.Map{g.maps.Links, g.maps.Counts} {
		if err := m.Delete(link); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget link %d: %w", link, err)
		}
	}
	delete(g.links, link)
	if l.plan == nil {
		return nil
	}
	return g.releaseLocked(l.plan)
}
