package cgroup

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
)

// Root is where the groups of one node are.
type Root struct{}

var errStub = dsec.Errorf(dsec.Unsupported, "cgroup", "", "not built yet")

// Open finds or makes the Root of that name.
func Open(name string) (*Root, error) { return nil, errStub }

// Version says which layout this machine has.
func (r *Root) Version() Version { return 0 }

// Describe says in one line where the groups are.
func (r *Root) Describe() string { return "" }

// Create makes a group and sets its limits.
func (r *Root) Create(name string, l Limits) (*Group, error) { return nil, errStub }

// Group returns an existing group, or NotFound.
func (r *Root) Group(name string) (*Group, error) { return nil, errStub }

// Service returns a group without limits for a process of the node itself,
// made if missing. It is not in List.
func (r *Root) Service(name string) (*Group, error) { return nil, errStub }

// List names every group, half-made ones included.
func (r *Root) List() ([]string, error) { return nil, errStub }

// Remove removes a group by name, whatever is left of it.
func (r *Root) Remove(ctx context.Context, name string) error { return errStub }

// RemoveAll removes the Root and everything in it, services too.
func (r *Root) RemoveAll(ctx context.Context) error { return errStub }

// Group is one sandbox's.
type Group struct{ Member }

// Limits are those set last.
func (g *Group) Limits() Limits { return Limits{} }

// Child makes the group of one command, or returns an existing one.
func (g *Group) Child(name string) (*Child, error) { return nil, errStub }

// Children names them.
func (g *Group) Children() ([]string, error) { return nil, errStub }

// Freeze stops every process and returns when all have stopped.
func (g *Group) Freeze(ctx context.Context) error { return errStub }

// Thaw undoes Freeze.
func (g *Group) Thaw(ctx context.Context) error { return errStub }

// Frozen reports whether Freeze is in force.
func (g *Group) Frozen() (bool, error) { return false, errStub }

// Stats samples the group.
func (g *Group) Stats() (Stats, error) { return Stats{}, errStub }

// OOMKills counts the processes killed by the memory limit. Cheap.
func (g *Group) OOMKills() (int64, error) { return 0, errStub }

// WaitOOM returns when the count is larger than seen, with the count. It holds two
// descriptors while it waits.
func (g *Group) WaitOOM(ctx context.Context, seen int64) (int64, error) { return 0, errStub }

// Update changes the limits of a living group; Devices cannot change.
func (g *Group) Update(l Limits) error { return errStub }

// Child is one command's part of a group.
type Child struct{ Member }

// DefaultDevices is null, zero, full, random, urandom, tty, ptmx and pts.
func DefaultDevices() []Device { return nil }

// FuseDevice allows /dev/fuse.
func FuseDevice() Device { return Device{} }

var _ time.Duration
