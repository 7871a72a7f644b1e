package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand/loader"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
	"github.com/opendsec/dsec/netpolicy/bpf"
	"github.com/opendsec/dsec/netpolicy/dns"
	"github.com/opendsec/dsec/netpolicy/egress"
	"github.com/opendsec/dsec/netpolicy/mirror"
	"github.com/opendsec/dsec/netpolicy/veth"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/container"
	"github.com/opendsec/dsec/runtime/gvisor"
	"github.com/opendsec/dsec/runtime/microvm"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
)

// machine is what sandboxes of the container tier are made of.
type machine struct {
	hold    *hold.Client
	groups  *cgroup.Root
	mounts  *rootfs.Mounts
	disks   diskpool.Pool
	network *veth.Network  // nil: the machine cannot; only network "none"
	gate    *bpf.Gate      // of the network
	names   *dns.Server    // that its sandboxes ask for
	egress  *egress.Client // that looks at those they say; nil: nothing that a name alone opens passes on ports 80 and 443
	tier    *container.Runtime
	vms     *microvm.Runtime
	driver  *qemu.Driver    // of its machines; nil: none was needed yet
	gvisor  *gvisor.Runtime // containers behind a kernel of their own

	packages *mirror.Attendance // nil: no mirror is served
	full     full
	evidence evidence
	eyes     *eyes  // of a measurement, in place of it; else nil
	uidBase  uint32 // of its sandboxes

	// What a machine has that serves, layers on demand and names; unset in those that live
	// for one command.
	onDemand bool
	ending   bool // to take it apart: no loader runs
	loader   *loader.Client
	whole    func(context.Context, layer.Digest)        // all data of a layer are here
	failed   func(context.Context, loader.Trouble) bool // a read of a layer is an error
	ended    func(context.Context, loader.Ended) bool   // what a mount of it came by
	short    func(ctx context.Context, diskFull bool)   // something found no room
	order    func(context.Context, layer.Digest) []layer.Range
	read     func(context.Context, layer.Digest, []layer.Range)
	refused  func(egress.Refusal)                                                     // a connection of a sandbox was
	unnamed  func(id dsec.SandboxID, name string, generation uint64, questions int64) // a name that it asked for is not opened
}

// openHold is how long a hold may take to start.
const openHold = 10 * time.Second

// steps opens a machine in boot order; undoing them closes it and ends no
// sandbox.
func (m *machine) steps(s *settings, log *slog.Logger) []lifecycle.Step {
	return []lifecycle.Step{
		{Name: "instance", Do: func(context.Context) error { return s.take(log) }},
		{Name: "file-max", Do: func(context.Context) error {
			if was, err := linux.RaiseFileMax(); err != nil {
				log.Warn("one sandbox can use up the open files of the machine: raise fs.file-max", "is", was, "err", err)
			}
			return nil
		}},
		{Name: "cgroup", Do: func(context.Context) (err error) {
			m.groups, err = cgroup.Open(s.cgroupName())
			return err
		}, Undo: func(context.Context) error { return m.groups.Close() }},
		{Name: "hold", Do: func(ctx context.Context) (err error) {
			if m.hold, err = startHold(ctx, s, m.groups); err == nil {
				logHold(log, m.hold.Info())
			}
			return err
		}, Undo: func(context.Context) error { return m.hold.Close() }},
		{Name: "loader", Do: func(ctx context.Context) (err error) {
			if !m.onDemand {
				return nil
			}
			if s.Node.OnDemand == loader.PreContent {
				if err := precontent.Supported(s.layerDir()); err != nil {
					return dsec.E(dsec.Unsupported, "bring layers on demand by", s.Node.OnDemand, err)
				}
			}
			m.loader, err = loader.Open(ctx, loader.Config{Socket: s.loaderSocket(), Layers: filepath.Join(s.layerDir(), "layers"), Keeper: m.hold, Log: log, Mechanism: s.Node.OnDemand, Ending: m.ending,
				Whole: m.whole, Failed: m.failed, Ended: m.ended, Short: m.short, Order: m.order, Read: m.read})
			return err
		}, Undo: func(context.Context) error {
			if m.loader == nil {
				return nil
			}
			return m.loader.Close()
		}},
		{Name: "mounts", Do: func(ctx context.Context) (err error) {
			o := rootfs.Options{Keeper: m.hold, Log: log}
			if m.loader != nil {
				o.Devices = m.loader
				o.Lives = func(ctx context.Context, d layer.Digest, session string) (bool, error) {
					return loader.IsKept(ctx, m.hold, d, session)
				}
			}
			m.mounts, err = rootfs.Open(ctx, o)
			return err
		}, Undo: func(context.Context) error { return m.mounts.Close() }},
		{Name: "disks", Do: func(ctx context.Context) (err error) {
			size, free, err := poolSize(s)
			if err != nil {
				return err
			}
			if err := poolLeast(s, size); err != nil {
				return err
			}
			if c := poolRoom(s, size, free); !c.OK {
				log.Warn(c.Detail)
			}
			m.disks, err = diskpool.Open(ctx, diskpool.Options{Dir: s.poolDir(), Size: size, Keeper: m.mounts.Keeper()})
			return err
		}, Undo: func(context.Context) error { return m.disks.Close() }},
		m.openNetwork(s, log),
		{Name: "audit", Do: func(ctx context.Context) error {
			if !m.onDemand || m.ending { // it lives for one command
				return nil
			}
			return m.evidence.open(ctx, s, m, log)
		}, Undo: func(context.Context) error { return m.evidence.close() }},
		{Name: "container", Do: func(ctx context.Context) (err error) {
			c := container.Config{Dir: s.sandboxDir(), UIDBase: s.Node.UIDBase, UIDRanges: s.Node.UIDRanges, Shells: s.Node.Shells,
				HostMounts: s.Node.MountRoots, Hold: m.hold, Cgroups: m.groups, Disks: m.disks, Mounts: m.mounts, Log: log,
				Foreign: isOtherTiers, Witness: m.evidence.witness(), Unseen: m.evidence.unseen}
			if m.uidBase = s.Node.UIDBase; m.eyes != nil {
				c.Witness = m.eyes
			}
			if m.evidence.store != nil {
				c.Refused = m.evidence.store.Append
			}
			if m.network != nil {
				c.Network = m.network
			}
			m.tier, err = container.Open(ctx, c)
			return err
		}, Undo: func(context.Context) error { return m.tier.Close() }},
		m.openVMs(s, log),
		{Name: "gvisor", Do: func(ctx context.Context) (err error) {
			m.gvisor, err = openGVisor(ctx, s, m, log)
			return err
		}, Undo: func(context.Context) error { return m.gvisor.Close() }},
		m.openFull(s, log),
	}
}

// isOtherTiers tells what other tiers have of what they share with containers.
func isOtherTiers(name string) bool {
	return strings.HasPrefix(name, gvisor.Prefix) || strings.HasPrefix(name, microvm.Prefix)
}

// runtimes are the tiers of a machine.
func (m *machine) runtimes() map[dsec.Tier]runtime.Runtime {
	return m.full.into(map[dsec.Tier]runtime.Runtime{dsec.TierContainer: m.tier, dsec.TierMicroVM: m.vms})
}

// openNetwork opens the network and what serves it, names before anybody asks.
func (m *machine) openNetwork(s *settings, log *slog.Logger) lifecycle.Step {
	return lifecycle.Step{Name: "network", Do: func(ctx context.Context) error {
		g, n, err := openNetwork(ctx, s, m.hold)
		if err != nil {
			log.Warn("there is no network for sandboxes", "err", err)
			return nil
		}
		m.gate, m.network = g, n
		if err := m.guard(); err != nil {
			log.Warn("packets of sandboxes are judged, but not what their programs try before", "err", err)
		}
		if m.onDemand && !m.ending {
			if err := m.openEgress(ctx, s, log); err != nil {
				return err
			}
		}
		if m.names, err = serveNames(n, m.unnamed, log); err == nil && m.onDemand && !m.ending {
			m.attend(s, log)
		}
		return err
	}, Undo: func(context.Context) error {
		if m.network == nil {
			return nil
		}
		var err error
		if m.names != nil {
			err = m.names.Close()
		}
		if m.egress != nil {
			err = errors.Join(err, m.egress.Close())
		}
		if m.packages != nil {
			err = errors.Join(err, m.packages.Close())
		}
		return errors.Join(err, m.network.Close(), m.gate.Close())
	}}
}

// startHold finds the hold of this machine or starts one in a control group of
// its own, outside of the agent's, so that ending the agent's group spares it.
func startHold(ctx context.Context, s *settings, groups *cgroup.Root) (*hold.Client, error) {
	g, err := groups.Service("hold")
	if err != nil {
		return nil, err
	}
	h, err := g.Handles()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	var tasks []string
	for _, t := range h.Tasks {
		tasks = append(tasks, t.Name())
	}
	binary, err := embedded.Hold()
	if err != nil {
		return nil, err
	}
	defer binary.Close()
	return hold.Ensure(ctx, hold.Options{Socket: s.holdSocket(), Binary: binary, Cgroup: h.Unified.Name(), Tasks: tasks,
		Log: s.holdLog(), Start: openHold})
}

// logHold says which hold it is: whether sandboxes may have outlived the agent
// before, and whether theirs is the program this agent brought.
func logHold(log *slog.Logger, i hold.Info) {
	log = log.With("pid", i.PID, "version", i.Version, "since", i.Started)
	switch {
	case i.Stale != nil:
		log.Warn("the hold could not be upgraded and runs its old program", "err", i.Stale)
	case i.Upgraded:
		log.Info("the hold was upgraded; its sandboxes run on")
	case i.Adopted:
		log.Info("the hold runs already")
	default:
		log.Info("the hold was started")
	}
}

func openNetwork(ctx context.Context, s *settings, keeper veth.Keeper) (*bpf.Gate, *veth.Network, error) {
	c, err := networkConfig(s, keeper)
	if err != nil {
		return nil, nil, err
	}
	g, err := bpf.Open(ctx, keeper, s.Instance)
	if err != nil {
		return nil, nil, err
	}
	c.Gate = g
	n, err := veth.Open(ctx, c)
	if err != nil {
		return nil, nil, errors.Join(err, g.Close())
	}
	return g, n, nil
}

// guard refuses what programs in sandboxes try to reach before it is a packet.
func (m *machine) guard() error {
	dir, err := m.groups.Directory()
	if err != nil {
		return err
	}
	return errors.Join(m.gate.Guard(dir), dir.Close())
}

// serveNames answers sandboxes whose network is an allow-list.
func serveNames(n *veth.Network, unnamed func(dsec.SandboxID, string, uint64, int64), log *slog.Logger) (*dns.Server, error) {
	udp, tcp, err := n.ListenDNS()
	if err != nil {
		return nil, err
	}
	c := dns.Config{Asker: func(a netip.Addr) (dns.Asker, bool) { return n.Asker(a) }, Node: n.InNode, Log: log}
	if unnamed != nil {
		c.Refused = func(from netip.Addr, name string, questions int64) {
			if id, generation, ok := n.Whose(from); ok {
				unnamed(id, name, generation, questions)
			}
		}
	}
	for _, a := range n.Servers() {
		c.Upstream = append(c.Upstream, netip.AddrPortFrom(a, 53))
	}
	return dns.Serve(c, udp, tcp), nil
}

func networkConfig(s *settings, keeper veth.Keeper) (veth.Config, error) {
	c := veth.Config{Name: s.Instance, Keeper: keeper, Conns: s.Node.OpenConns, Mirror: true}
	var err error
	if s.Node.Subnet != "" { // else of a machine for the moment, which takes a free one
		if c.Subnet, err = netip.ParsePrefix(s.Node.Subnet); err != nil {
			return c, err
		}
	}
	for _, d := range s.Node.DenyNets {
		p, err := netip.ParsePrefix(d)
		if err != nil {
			return c, err
		}
		c.Never = append(c.Never, p)
	}
	for _, a := range s.Node.Nameservers {
		ip, err := netip.ParseAddr(a)
		if err != nil {
			return c, err
		}
		c.DNS = append(c.DNS, ip)
	}
	return c, nil
}
