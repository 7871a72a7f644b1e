package veth

import (
	"context"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// machineLock is held while forwarding of the node is turned on or off: several
// networks, of instances that know nothing of each other, share it.
const machineLock = "/run/dsec-forwarding.lock"

// offMark is an empty chain in the table of a network. It remembers that the
// node did not forward before there was one of ours.
const offMark = "forwarding_was_off"

const tablePrefix = "dsec_"

// locked runs f while no other network changes the forwarding of a node.
func locked(f func() error) error {
	file, err := os.OpenFile(machineLock, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // closing it gives the lock back
	if err := linux.Flock(file, unix.LOCK_EX); err != nil {
		return &os.PathError{Op: "lock", Path: machineLock, Err: err}
	}
	return f()
}

// forward has the node forward, and its rules in force before it does. Every
// network remembers that it did not before the first one came.
func (n *Network) forward(ctx context.Context) error {
	return locked(func() error {
		on, err := n.forwarding()
		if err != nil {
			return err
		}
		tables, err := n.tables(ctx)
		if err != nil {
			return err
		}
		marks, err := n.marked(ctx)
		if err != nil {
			return err
		}
		off := !on
		for _, t := range tables {
			off = off || marks[t]
		}
		if err := nft(ctx, n.node, n.nodeRules(off)); err != nil {
			return err
		}
		return inNamespace(n.node, func() error { return sysctl("net/ipv4/ip_forward", "1") })
	})
}

// unforward takes the rules away. The last network of the node leaves the
// forwarding as the first one found it.
func (n *Network) unforward(ctx context.Context) error {
	return locked(func() error {
		marks, err := n.marked(ctx)
		if err != nil {
			return err
		}
		if err := nft(ctx, n.node, fmt.Sprintf("table inet %[1]s\ndelete table inet %[1]s\n", n.table())); err != nil {
			return err
		}
		others, err := n.tables(ctx)
		if err != nil || !marks[n.table()] || len(others) > 0 {
			return err
		}
		return inNamespace(n.node, func() error { return sysctl("net/ipv4/ip_forward", "0") })
	})
}

func (n *Network) forwarding() (on bool, err error) {
	err = inNamespace(n.node, func() error {
		now, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
		on = strings.TrimSpace(string(now)) != "0"
		return err
	})
	return on, err
}

// tables of all networks of this node.
func (n *Network) tables(ctx context.Context) (all []string, err error) {
	text, err := output(ctx, n.node, "nft", "list", "tables", "inet")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) { // "table inet dsec_main"
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[2], tablePrefix) {
			all = append(all, f[2])
		}
	}
	return all, nil
}

// marked are the tables that remember that the node did not forward before.
func (n *Network) marked(ctx context.Context) (map[string]bool, error) {
	text, err := output(ctx, n.node, "nft", "list", "chains", "inet")
	if err != nil {
		return nil, err
	}
	marks, table := map[string]bool{}, ""
	for line := range strings.Lines(string(text)) { // "table inet dsec_main {", then "chain off {"
		switch f := strings.Fields(line); {
		case len(f) >= 3 && f[0] == "table":
			table = f[2]
		case len(f) >= 2 && f[0] == "chain" && f[1] == offMark:
			marks[table] = true
		}
	}
	return marks, nil
}
