package cluster

import (
	"context"
	"errors"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/opendsec/dsec"
)

// Values is a part of the durable configuration: the keys below one prefix.
type Values struct {
	kv     jetstream.KeyValue
	prefix string
}

// Config returns the values below a name, such as "keys".
func (c *Cluster) Config(name string) *Values { return &Values{kv: c.conf, prefix: name + "."} }

// Put writes one value durably.
func (v *Values) Put(ctx context.Context, id string, value []byte) error {
	if _, err := v.kv.Put(ctx, v.prefix+id, value); err != nil {
		return dsec.E(dsec.Unavailable, "write configuration", v.prefix+id, err)
	}
	return nil
}

// Load calls fn with every value.
func (v *Values) Load(ctx context.Context, fn func(id string, value []byte)) error {
	w, err := v.kv.Watch(ctx, v.prefix+">", jetstream.IgnoreDeletes())
	if err != nil {
		return dsec.E(dsec.Unavailable, "read configuration", v.prefix, err)
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return dsec.E(dsec.ClassOf(ctx.Err()), "read configuration", v.prefix, ctx.Err())
		case e, ok := <-w.Updates():
			if !ok {
				return dsec.E(dsec.Unavailable, "read configuration", v.prefix, errors.New("watch ended"))
			}
			if e == nil {
				return nil
			}
			fn(strings.TrimPrefix(e.Key(), v.prefix), e.Value())
		}
	}
}
