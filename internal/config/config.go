// Package config is the configuration of the daemons of one machine: all
// defaults in one place, one YAML file over them, flags over that, and a check
// without side effects. deploy/dsec.yaml is the commented sample; a test keeps
// it equal to the defaults.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/opendsec/dsec"
)

// Config of `dsec up` and of the daemons it starts.
type Config struct {
	Instance string  `yaml:"instance"` // names control groups and network of this dsec; unique on the machine
	Data     string  `yaml:"data"`     // everything that must survive a reboot
	Run      string  `yaml:"run"`      // sockets; may be on tmpfs
	Blobs    string  `yaml:"blobs"`    // object storage of layers, a URL; empty: a directory of data
	Node     Node    `yaml:"node"`
	Gateway  Gateway `yaml:"gateway"`
}

// Node is the agent's part.
type Node struct {
	ID            string   `yaml:"id"`             // empty: made once and kept under data
	MaxLive       int      `yaml:"max_live"`       // sandboxes at once
	Shells        int      `yaml:"shells"`         // sandboxes without a root that are kept ready, about 0.7 MiB each
	CPUOvercommit float64  `yaml:"cpu_overcommit"` // sum of limits ÷ cores
	MemOvercommit float64  `yaml:"mem_overcommit"` // sum of limits ÷ memory
	DiskPool      string   `yaml:"disk_pool"`      // size of the pool of writable layers: "64GiB", or "50%" of what is free
	UIDBase       uint32   `yaml:"uid_base"`       // first host uid of sandboxes
	UIDRanges     int      `yaml:"uid_ranges"`     // 65,536 ids each
	MountRoots    []string `yaml:"mount_roots"`    // host directories that may be shown inside, read-only
	Subnet        string   `yaml:"subnet"`         // addresses of sandboxes with network "open"
	DenyNets      []string `yaml:"deny_nets"`      // that no rule opens, besides what always is closed
	Nameservers   []string `yaml:"nameservers"`    // resolv.conf of "open"; empty: the machine's
	OpenConns     int      `yaml:"open_conns"`     // connections of one sandbox with network "open" at once
	PortConns     int      `yaml:"port_conns"`     // connections to ports of one sandbox at once
	Mirror        string   `yaml:"mirror"`         // registry mirror asked first, "host[:port]"
	ImageAge      int      `yaml:"image_age"`      // hours after which a creation looks up again what a reference means; 0: never
	KeepRecords   int      `yaml:"keep_records"`   // days
	RecordBytes   string   `yaml:"record_bytes"`   // most bytes of records
	Audit         bool     `yaml:"audit"`          // keep evidence of what sandboxes do
	OnDemand      string   `yaml:"on_demand"`      // how reads of what is not here are seen: "fuse", "pre-content"; "off": layers are fetched whole
	LayerCache    string   `yaml:"layer_cache"`    // most that data of layers take, "200GiB" or "50%" of the file system: unused ones go; beyond it "fuse" answers without keeping, "pre-content" exceeds it
	LoaderUID     int      `yaml:"loader_uid"`     // of the process that does; no other should have it
	Runsc         string   `yaml:"runsc"`          // gVisor's program, for isolation "gvisor"; empty: the one in PATH
	EgressUID     int      `yaml:"egress_uid"`     // of the process that looks at names in TLS and HTTP; no other should have it
	Packages      Packages `yaml:"packages"`       // the mirror of packages
	QEMU          string   `yaml:"qemu"`           // program that runs virtual machines; empty: the one in PATH
	KernelCache   string   `yaml:"kernel_cache"`   // directory of kernels for virtual machines, fetched when they are needed; empty: under data
}

// Packages says where the mirror of packages has them from. A service without a URL
// is not offered.
type Packages struct {
	UID            int      `yaml:"uid"`             // of the process that serves it; no other should have it
	Cache          string   `yaml:"cache"`           // most that its cache takes, "10GiB" or "5%" of the file system
	PyPI           string   `yaml:"pypi"`            // URL below which is simple/, with JSON and times of upload (PEP 691, 700)
	NPM            string   `yaml:"npm"`             // of a registry
	Go             string   `yaml:"go"`              // of a module proxy
	SumDB          string   `yaml:"sumdb"`           // of its checksum database
	Debian         string   `yaml:"debian"`          // below which is dists/
	DebianSecurity string   `yaml:"debian_security"` // below which is dists/
	Hosts          []string `yaml:"hosts"`           // that indexes and redirects of these may lead to, besides their own, by TLS
}

// Gateway is the front door's part.
type Gateway struct {
	Listen      string `yaml:"listen"`        // TCP address; empty: unix socket only
	TLSCert     string `yaml:"tls_cert"`      // needed when listen is not loopback
	TLSKey      string `yaml:"tls_key"`       //
	Group       string `yaml:"group"`         // members may use the unix socket as admins
	UID         int    `yaml:"uid"`           // the gateway's own; no other process should have it
	MaxLive     int    `yaml:"max_live"`      // per project; 0: no limit
	MaxInFlight int    `yaml:"max_in_flight"` // requests at once
	AccessLog   bool   `yaml:"access_log"`    // a line for each request, to stderr
}

// Default is every default there is.
func Default() Config {
	return Config{
		Instance: "main",
		Data:     "/var/lib/dsec",
		Run:      "/run/dsec",
		Node: Node{MaxLive: 4000, Shells: 16, CPUOvercommit: 200, MemOvercommit: 20, DiskPool: "50%", UIDBase: 1 << 20, UIDRanges: 8000,
			Subnet: "100.96.0.0/14", OpenConns: 4096, PortConns: 256, KeepRecords: 30, RecordBytes: "1GiB", Audit: true,
			OnDemand: "fuse", LayerCache: "50%", LoaderUID: 61441, EgressUID: 61442,
			Packages: Packages{UID: 61443, Cache: "10GiB", PyPI: "https://pypi.org", NPM: "https://registry.npmjs.org", Go: "https://proxy.golang.org", SumDB: "https://sum.golang.org",
				Debian: "https://deb.debian.org/debian", DebianSecurity: "https://deb.debian.org/debian-security", Hosts: []string{"files.pythonhosted.org"}}},
		Gateway: Gateway{Listen: "127.0.0.1:7440", Group: "dsec", UID: 61440, MaxInFlight: 8192, AccessLog: true},
	}
}

var validInstance = regexp.MustCompile(`^[a-z0-9]{1,8}$`)

// MachineUIDs is how many virtual machines of a tier there may be, each with a user of its own:
// those of microVMs are below the ranges of sandboxes, and below them those of full VMs.
const MachineUIDs = 4096

// mostShells bounds what waits for a sandbox to need it.
const mostShells = 1024

// mostConns is as many as a kernel follows on a large machine.
const mostConns = 1 << 20

// maxFile bounds a configuration file.
const maxFile = 1 << 20

// Load reads a YAML file over the defaults. An unknown field is an error. A
// missing file is one only if must is set.
func Load(path string, must bool) (Config, error) {
	c := Default()
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) && !must {
		return c, nil
	}
	if err != nil {
		return c, dsec.E(dsec.Invalid, "read configuration", path, err)
	}
	if len(text) > maxFile {
		return c, dsec.Errorf(dsec.Invalid, "read configuration", path, "%d bytes, at most %d", len(text), maxFile)
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return c, dsec.E(dsec.Invalid, "read configuration", path, err)
	}
	return c, nil
}

// Validate reports the first value that cannot work. It touches nothing.
func (c *Config) Validate() error {
	bad := func(field, format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, "check configuration", field, format, args...)
	}
	for name, path := range map[string]string{"data": c.Data, "run": c.Run} {
		if !filepath.IsAbs(path) {
			return bad(name, "%s is not absolute", dsec.Quote(path))
		}
	}
	if !validInstance.MatchString(c.Instance) {
		return bad("instance", "%s, want %s", dsec.Quote(c.Instance), validInstance)
	}
	if c.Blobs != "" && !strings.HasPrefix(c.Blobs, "file://") && !strings.HasPrefix(c.Blobs, "s3://") {
		return bad("blobs", "want file:///path or s3://bucket/prefix") // what it is may have a password in it
	}
	n := c.Node
	if n.ID != "" {
		if _, err := dsec.ParseNodeID(n.ID); err != nil {
			return bad("node.id", "%w", err)
		}
	}
	if n.ImageAge < 0 {
		return bad("node.image_age", "%d hours", n.ImageAge)
	}
	if n.Shells < 0 || n.Shells > mostShells {
		return bad("node.shells", "%d, want 0 to %d", n.Shells, mostShells)
	}
	if n.MaxLive < 1 {
		return bad("node.max_live", "%d, want at least 1", n.MaxLive)
	}
	if need := n.MaxLive + n.Shells; n.UIDRanges < need {
		return bad("node.uid_ranges", "%d, want at least %d: one for each of %d sandboxes (node.max_live) and %d shells (node.shells); or lower node.max_live", n.UIDRanges, need, n.MaxLive, n.Shells)
	}
	if n.UIDBase < 1<<16+2*MachineUIDs || uint64(n.UIDBase)+uint64(n.UIDRanges)<<16 > math.MaxUint32 {
		return bad("node.uid_base", "%d ranges from %d, and %d users of virtual machines below them, leave the 32 bits of a uid, or touch the host's own", n.UIDRanges, n.UIDBase, 2*MachineUIDs)
	}
	if n.CPUOvercommit <= 0 || n.MemOvercommit <= 0 {
		return bad("node.cpu_overcommit, node.mem_overcommit", "%g and %g, want more than 0", n.CPUOvercommit, n.MemOvercommit)
	}
	if n.OpenConns < 1 || n.OpenConns > mostConns {
		return bad("node.open_conns", "%d, want 1 to %d", n.OpenConns, mostConns)
	}
	if n.PortConns < 1 {
		return bad("node.port_conns", "%d, want at least 1", n.PortConns)
	}
	if _, err := netip.ParsePrefix(n.Subnet); err != nil {
		return bad("node.subnet", "%w", err)
	}
	for _, d := range n.DenyNets {
		if _, err := netip.ParsePrefix(d); err != nil {
			return bad("node.deny_nets", "%w", err)
		}
	}
	if _, err := Bytes(n.DiskPool, 1); err != nil {
		return bad("node.disk_pool", "%w", err)
	}
	if _, err := Bytes(n.RecordBytes, 1); err != nil {
		return bad("node.record_bytes", "%w", err)
	}
	if _, err := Bytes(n.LayerCache, 1); err != nil {
		return bad("node.layer_cache", "%w", err)
	}
	if u := n.Packages.UID; u < 1 || u == c.Gateway.UID || u == n.LoaderUID {
		return bad("node.packages.uid", "%d: the mirror runs neither as root nor as another part", u)
	}
	if err := n.Packages.validate(bad); err != nil {
		return err
	}
	if !slices.Contains([]string{"fuse", "pre-content", "off"}, n.OnDemand) {
		return bad("node.on_demand", "%s: want fuse, pre-content or off", dsec.Quote(n.OnDemand))
	}
	if n.LoaderUID < 1 || n.LoaderUID == c.Gateway.UID {
		return bad("node.loader_uid", "%d: the loader runs neither as root nor as the gateway", n.LoaderUID)
	}
	if n.EgressUID < 1 || n.EgressUID == c.Gateway.UID || n.EgressUID == n.LoaderUID || n.EgressUID == n.Packages.UID {
		return bad("node.egress_uid", "%d: the process that looks at names runs neither as root nor as gateway or loader", n.EgressUID)
	}
	return c.Gateway.validate(bad)
}

func (p *Packages) validate(bad func(string, string, ...any) error) error {
	if _, err := Bytes(p.Cache, 1); err != nil {
		return bad("node.packages.cache", "%w", err)
	}
	for name, s := range map[string]string{"pypi": p.PyPI, "npm": p.NPM, "go": p.Go, "sumdb": p.SumDB, "debian": p.Debian, "debian_security": p.DebianSecurity} {
		if s == "" {
			continue
		}
		if u, err := url.Parse(s); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
			return bad("node.packages."+name, "want http(s)://host/path")
		}
	}
	return nil
}

func (g *Gateway) validate(bad func(string, string, ...any) error) error {
	if g.UID < 1 {
		return bad("gateway.uid", "%d: the gateway never runs as root", g.UID)
	}
	if g.MaxInFlight < 0 {
		return bad("gateway.max_in_flight", "%d is negative", g.MaxInFlight)
	}
	if g.Listen == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(g.Listen)
	if err != nil {
		return bad("gateway.listen", "%w", err)
	}
	ip, err := netip.ParseAddr(host)
	loopback := host == "localhost" || (err == nil && ip.IsLoopback())
	if !loopback && (g.TLSCert == "" || g.TLSKey == "") {
		return bad("gateway.listen", "%s is reachable from outside: tls_cert and tls_key are required", g.Listen)
	}
	return nil
}

// Bytes reads "64GiB", "512MiB", "4096" or "50%" (of the given whole).
func Bytes(s string, whole int64) (int64, error) {
	unit := strings.TrimLeft(s, "0123456789.")
	n, err := strconv.ParseFloat(strings.TrimSuffix(s, unit), 64)
	if err != nil {
		return 0, fmt.Errorf("%s is no size", dsec.Quote(s))
	}
	unit = strings.TrimSpace(unit)
	factor, ok := map[string]float64{"": 1, "%": float64(whole) / 100, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
		"TiB": 1 << 40}[unit]
	if !ok || n*factor > math.MaxInt64/2 {
		return 0, fmt.Errorf("%s is no size: want a number with KiB, MiB, GiB, TiB or %%", dsec.Quote(s))
	}
	return int64(n * factor), nil
}
