package node

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// Screens is what a node offers of sandboxes that are machines. Each is Unsupported, with the name of the
// tier, where that cannot. See package runtime for what they promise.
type Screens interface {
	Screenshot(ctx context.Context, id dsec.SandboxID, region dsec.Region) (dsec.Picture, error)
	Act(ctx context.Context, id dsec.SandboxID, actions []dsec.ScreenAction) error
	Console(ctx context.Context, id dsec.SandboxID) ([]byte, error)
	Power(ctx context.Context, id dsec.SandboxID, p dsec.Power) error
	Mark(ctx context.Context, id dsec.SandboxID, name string) error
	Revert(ctx context.Context, id dsec.SandboxID, name string) error
	Marks(ctx context.Context, id dsec.SandboxID) ([]string, error)
}

var _ Screens = (*Node)(nil)

// ability runs f on the ability T of a sandbox's tier. Who looks at a sandbox uses it; whoever acts resumes it first.
func ability[T any](ctx context.Context, n *Node, what string, id dsec.SandboxID, f func(T) error) error {
	b, err := n.reach(ctx, what, id)
	if err != nil {
		return err
	}
	a, ok := b.rt.(T)
	if !ok {
		return b.unsupported(what)
	}
	b.use(1)
	defer b.use(-1)
	return b.explain(what, f(a))
}

// Screenshot implements Screens.
func (n *Node) Screenshot(ctx context.Context, id dsec.SandboxID, region dsec.Region) (p dsec.Picture, err error) {
	err = ability(ctx, n, "take screenshot", id, func(r runtime.Screener) (err error) { p, err = r.Screenshot(ctx, id, region); return err })
	return p, err
}

// Act implements Screens.
func (n *Node) Act(ctx context.Context, id dsec.SandboxID, actions []dsec.ScreenAction) error {
	return ability(ctx, n, "act on screen", id, func(r runtime.Screener) error { return r.Act(ctx, id, actions) })
}

// Console implements Screens.
func (n *Node) Console(ctx context.Context, id dsec.SandboxID) (text []byte, err error) {
	err = ability(ctx, n, "read console", id, func(r runtime.Machiner) (err error) { text, err = r.Console(ctx, id); return err })
	return text, err
}

// Power implements Screens.
func (n *Node) Power(ctx context.Context, id dsec.SandboxID, p dsec.Power) error {
	return ability(ctx, n, "switch power", id, func(r runtime.Machiner) error { return r.Power(ctx, id, p) })
}

// Mark implements Screens.
func (n *Node) Mark(ctx context.Context, id dsec.SandboxID, name string) error {
	return ability(ctx, n, "mark sandbox", id, func(r runtime.Marker) error { return r.Mark(ctx, id, name) })
}

// Revert implements Screens.
func (n *Node) Revert(ctx context.Context, id dsec.SandboxID, name string) error {
	return ability(ctx, n, "revert sandbox", id, func(r runtime.Marker) error { return r.Revert(ctx, id, name) })
}

// Marks implements Screens.
func (n *Node) Marks(ctx context.Context, id dsec.SandboxID) (names []string, err error) {
	err = ability(ctx, n, "list marks", id, func(r runtime.Marker) (err error) { names, err = r.Marks(ctx, id); return err })
	return names, err
}
