package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/runtime"
)

// Info is who one is, to the server.
type Info struct {
	Version   string `json:"version"`
	Principal string `json:"principal"`
	Project   string `json:"project"`
	Role      string `json:"role"`
	Live      int    `json:"live"`
	Quota     int    `json:"quota"` // most live sandboxes; 0: no limit
}

// Info asks the server.
func (c *Client) Info(ctx context.Context) (Info, error) {
	r, err := c.system.Info(ctx, &dsecv1.InfoRequest{})
	return Info{r.GetVersion(), r.GetPrincipal(), r.GetProject(), r.GetRole(), int(r.GetLive()), int(r.GetQuota())},
		wire.FromConnect("ask server", err)
}

// Node is what the cluster knows of a node.
type Node struct {
	ID       dsec.NodeID `json:"id"`
	Epoch    uint64      `json:"epoch"`
	Alive    bool        `json:"alive"`
	Draining bool        `json:"draining,omitempty"`
	Live     int         `json:"live"`
	Starting int         `json:"starting"`
	MaxLive  int         `json:"max_live"`
	CPU      float64     `json:"cpu"` // committed fraction
	Memory   float64     `json:"memory"`
	Disk     float64     `json:"disk"`
	Tiers    []dsec.Tier `json:"tiers"`
	Seen     time.Time   `json:"seen"`
	Version  string      `json:"version"`
}

// Nodes lists the nodes.
func (c *Client) Nodes(ctx context.Context) ([]Node, error) {
	r, err := c.system.Nodes(ctx, &dsecv1.NodesRequest{})
	var out []Node
	for _, n := range r.GetNodes() {
		x := Node{ID: dsec.NodeID(n.Id), Epoch: n.Epoch, Alive: n.Alive, Draining: n.Draining, Live: int(n.Live),
			Starting: int(n.Starting), MaxLive: int(n.MaxLive), CPU: n.Cpu, Memory: n.Memory, Disk: n.Disk,
			Seen: wire.Instant(n.Seen), Version: n.Version}
		for _, t := range n.Tiers {
			x.Tiers = append(x.Tiers, dsec.Tier(t))
		}
		out = append(out, x)
	}
	return out, wire.FromConnect("list nodes", err)
}

// Doctor asks a node what its machine can do; "" is the only one.
func (c *Client) Doctor(ctx context.Context, node dsec.NodeID) ([]runtime.Report, error) {
	r, err := c.system.Doctor(ctx, &dsecv1.DoctorRequest{Node: string(node)})
	return wire.ReportsFrom(r.GetReports()), wire.FromConnect("examine node", err)
}

// Key is an API key without its secret.
type Key struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Role    string    `json:"role"`
	Project string    `json:"project"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
	Revoked bool      `json:"revoked,omitempty"`
}

func keyFrom(k *dsecv1.Key) Key {
	return Key{k.GetId(), k.GetName(), k.GetRole(), k.GetProject(), wire.Instant(k.GetCreated()), wire.Instant(k.GetExpires()), k.GetRevoked()}
}

// CreateKey makes an API key and returns its secret, which is shown once. Role
// "" is user, project "" the default one, lifetime 0 has no end.
func (c *Client) CreateKey(ctx context.Context, name, role, project string, lifetime time.Duration) (Key, string, error) {
	r, err := c.keys.Create(ctx, &dsecv1.CreateKeyRequest{Name: name, Role: role, Project: project,
		Lifetime: wire.Seconds(lifetime)})
	return keyFrom(r.GetKey()), r.GetSecret(), wire.FromConnect("create key", err)
}

// Keys lists all keys.
func (c *Client) Keys(ctx context.Context) ([]Key, error) {
	r, err := c.keys.List(ctx, &dsecv1.ListKeysRequest{})
	var out []Key
	for _, k := range r.GetKeys() {
		out = append(out, keyFrom(k))
	}
	return out, wire.FromConnect("list keys", err)
}

// RevokeKey ends a key.
func (c *Client) RevokeKey(ctx context.Context, id string) (existed bool, err error) {
	r, err := c.keys.Revoke(ctx, &dsecv1.RevokeKeyRequest{Id: id})
	return r.GetExisted(), wire.FromConnect("revoke key", err)
}
