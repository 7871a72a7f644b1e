package node

import (
	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// kind is what a runtime is chosen by.
type kind struct {
	tier      dsec.Tier
	isolation dsec.Isolation
}

func (k kind) String() string {
	if k.isolation != dsec.IsolationDefault {
		return string(k.tier) + " with isolation " + string(k.isolation)
	}
	return string(k.tier)
}

func kindOf(s *dsec.Spec) kind { return kind{s.Tier, s.Isolation} }

// runtimes are all that the node has.
func (c *Config) runtimes() map[kind]runtime.Runtime {
	all := make(map[kind]runtime.Runtime, len(c.Runtimes)+len(c.Isolated))
	for t, rt := range c.Runtimes {
		all[kind{tier: t}] = rt
	}
	for i, rt := range c.Isolated {
		all[kind{dsec.TierContainer, i}] = rt
	}
	return all
}

// runtimeOf never returns one that isolates less than was asked for.
func (n *Node) runtimeOf(s *dsec.Spec) (runtime.Runtime, error) {
	k := kindOf(s)
	if rt := n.cfg.runtimes()[k]; rt != nil {
		return rt, nil
	}
	return nil, dsec.Errorf(dsec.Unsupported, "find tier", k.String(), "this node does not have it")
}
