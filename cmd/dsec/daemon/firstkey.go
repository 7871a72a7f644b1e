package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/config"
	"github.com/opendsec/dsec/internal/contexts"
)

// contextName is what the first start calls its context: that of the usual
// instance is "local".
func (s *settings) contextName() string {
	if s.Instance == config.Default().Instance {
		return "local"
	}
	return s.Instance
}

// awaitNode returns when the gateway has heard of the node and would give it
// sandboxes.
func awaitNode(ctx context.Context, s *settings) error {
	c, err := client.New(client.Config{URL: "unix://" + s.socket()})
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for {
		nodes, err := c.Nodes(ctx)
		if err == nil && slices.ContainsFunc(nodes, func(n client.Node) bool { return n.Alive }) {
			return nil
		}
		select {
		case <-ctx.Done():
			return dsec.E(dsec.Timeout, "wait for the node", s.socket(), err)
		case <-time.After(20 * time.Millisecond): // the first heartbeat is on its way
		}
	}
}

// firstKey makes one admin key at the first start, prints it, and writes it to
// the context file of the user who started dsec.
func firstKey(ctx context.Context, s *settings) error {
	if _, err := os.Stat(s.adminMade()); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	c, err := client.New(client.Config{URL: "unix://" + s.socket()})
	if err != nil {
		return err
	}
	defer c.Close()
	_, secret, err := c.CreateKey(ctx, "first admin", "admin", "", 0)
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.adminMade(), nil, 0o600); err != nil {
		return dsec.E(dsec.Internal, "write", s.adminMade(), err)
	}
	path := contexts.Path(os.Getenv)
	fmt.Printf("admin key (shown once): %s\n", secret)
	f, err := contexts.Load(path)
	if err != nil {
		return err
	}
	name := freeName(f, s.contextName(), s.socket())
	f.Contexts[name] = contexts.Context{Socket: s.socket(), APIKey: secret}
	if f.Current == "" {
		f.Current = name
	}
	if err := f.Save(path); err != nil {
		return err
	}
	fmt.Printf("context %q written to %s\n", name, path)
	return nil
}

// freeName is name, or with a number what no other server's context is called:
// its key is shown only once.
func freeName(f contexts.File, name, socket string) string {
	for n, try := 2, name; ; n++ {
		if c, taken := f.Contexts[try]; !taken || c.Socket == socket {
			return try
		}
		try = fmt.Sprintf("%s-%d", name, n)
	}
}

// forgetContext takes away what firstKey wrote, when the key it holds is gone
// with the data.
func forgetContext(s *settings) error {
	path := contexts.Path(os.Getenv)
	f, err := contexts.Load(path)
	if err != nil {
		return err
	}
	found := false
	for name, c := range f.Contexts {
		if c.Socket != s.socket() {
			continue
		}
		found = true
		delete(f.Contexts, name)
		if f.Current == name {
			f.Current = ""
		}
	}
	if !found {
		return nil
	}
	return f.Save(path)
}
