package veth

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// Wall is a chain of the node's own firewall that drops what the router sends
// outside. Nothing that dsec does in tables of its own can prevent that: every
// chain of a hook must accept a packet.
type Wall struct {
	Chain  string // "ip filter FORWARD"
	Why    string // "policy drop"
	Remedy string // a command for the node's owner
}

// Walls looks for them in the rules of nftables, which are also those of
// iptables-nft, and of iptables-legacy. A table in which a rule names the
// link of the network is left to its owner. Only c.Name and c.Node are used.
func Walls(ctx context.Context, c Config) ([]Wall, error) {
	const op = "read the node's firewall"
	ns, err := nodeNamespace(c.Node)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, "", err)
	}
	defer func() { _ = ns.Close() }()
	rules, err := output(ctx, ns, "nft", "-j", "-t", "list", "ruleset")
	if err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, "", err)
	}
	walls, err := wallsIn(rules, c.nodeLink())
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, op, "", err)
	}
	old, err := legacyWall(ctx, ns, c.nodeLink())
	if err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, "", err)
	}
	return append(walls, old...), nil
}

// What nft prints, as far as it matters here.
type (
	ruleset struct {
		Items []struct {
			Chain *chain
			Rule  *rule
		} `json:"nftables"`
	}
	chain struct {
		Family, Table, Name, Hook, Policy string
	}
	rule struct {
		Family, Table, Chain string
		Expr                 json.RawMessage
	}
)

// wallsIn finds base chains of forwarded IPv4 packets that end in a drop.
func wallsIn(rules []byte, link string) ([]Wall, error) {
	var set ruleset
	if err := json.Unmarshal(rules, &set); err != nil {
		return nil, err
	}
	last := map[[3]string]json.RawMessage{} // rule of a chain
	known, docker := map[[2]string]bool{}, false
	for _, i := range set.Items {
		if r := i.Rule; r != nil {
			last[[3]string{r.Family, r.Table, r.Chain}] = r.Expr
			known[[2]string{r.Family, r.Table}] = known[[2]string{r.Family, r.Table}] || names(r.Expr, link)
		}
		docker = docker || i.Chain != nil && i.Chain.Name == "DOCKER-USER"
	}
	var walls []Wall
	for _, i := range set.Items {
		c := i.Chain
		if c == nil || c.Hook != "forward" || c.Family != "ip" && c.Family != "inet" || known[[2]string{c.Family, c.Table}] {
			continue
		}
		why := ""
		switch {
		case ends(last[[3]string{c.Family, c.Table, c.Name}]):
			why = "its last rule drops the rest"
		case c.Policy == "drop":
			why = "policy drop"
		default:
			continue
		}
		walls = append(walls, Wall{Chain: c.Family + " " + c.Table + " " + c.Name, Why: why, Remedy: c.remedy(link, docker)})
	}
	return walls, nil
}

// names tells whether a rule matches the link.
func names(expr json.RawMessage, link string) bool {
	for _, n := range []string{link, "dsec-*"} {
		if bytes.Contains(expr, []byte(`"`+n+`"`)) {
			return true
		}
	}
	return false
}

// ends tells whether a rule lets no packet pass, whatever it is.
func ends(expr json.RawMessage) bool {
	var steps []map[string]json.RawMessage
	if json.Unmarshal(expr, &steps) != nil {
		return false
	}
	for _, s := range steps {
		for what := range s {
			switch what {
			case "counter", "log", "comment": // of every packet
			case "drop", "reject":
				return true
			default:
				return false
			}
		}
	}
	return false
}

// remedy goes through the tool that owns the table.
func (c *chain) remedy(link string, docker bool) string {
	switch {
	case c.Table == "firewalld":
		return fmt.Sprintf("firewall-cmd --permanent --zone=trusted --add-interface=%s && firewall-cmd --reload", link)
	case c.Family == "ip" && c.Table == "filter" && c.Name == "FORWARD":
		at := c.Name
		if docker {
			at = "DOCKER-USER" // survives a restart of Docker
		}
		return iptables("iptables", at, link)
	}
	at := c.Family + " " + c.Table + " " + c.Name
	return fmt.Sprintf("nft insert rule %[1]s iifname %[2]s accept && nft insert rule %[1]s oifname %[2]s accept", at, link)
}

func iptables(tool, at, link string) string {
	return fmt.Sprintf("%[1]s -I %[2]s -i %[3]s -j ACCEPT && %[1]s -I %[2]s -o %[3]s -j ACCEPT", tool, at, link)
}

// legacyWall looks at the rules that nft does not show.
func legacyWall(ctx context.Context, ns *os.File, link string) ([]Wall, error) {
	var tables []byte
	err := inNamespace(ns, func() (err error) {
		tables, err = os.ReadFile("/proc/thread-self/net/ip_tables_names")
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && !slices.Contains(strings.Fields(string(tables)), "filter") {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	w := Wall{Chain: "iptables-legacy FORWARD", Why: "policy drop", Remedy: iptables("iptables-legacy", "FORWARD", link)}
	rules, err := output(ctx, ns, "iptables-legacy", "-w", "-S")
	switch {
	case errors.Is(err, exec.ErrNotFound):
		w.Why = "it is in use, and iptables-legacy is not installed to read it"
		return []Wall{w}, nil
	case err != nil:
		return nil, err
	}
	lines := strings.Split(string(rules), "\n")
	accepted := func(line string) bool {
		f := strings.Fields(line)
		return slices.Contains(f, link) || slices.Contains(f, "dsec-+")
	}
	if !slices.Contains(lines, "-P FORWARD DROP") || slices.ContainsFunc(lines, accepted) {
		return nil, nil
	}
	return []Wall{w}, nil
}

// output runs a program in a namespace.
func output(ctx context.Context, ns *os.File, name string, args ...string) (out []byte, err error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, "run", name, err)
	}
	err = inNamespace(ns, func() error {
		var errs bytes.Buffer
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.Stderr = &errs
		if out, err = cmd.Output(); err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(errs.Bytes()))
		}
		return nil
	})
	return out, err
}
