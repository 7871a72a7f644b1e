package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/runtime"
)

// Sandbox is what the platform tells about a sandbox.
type Sandbox struct {
	ID      dsec.SandboxID `json:"id"`
	Project string         `json:"project"`
	Node    dsec.NodeID    `json:"node"`
	Spec    dsec.Spec      `json:"spec"`
	State   dsec.State     `json:"state"`
	Result  *dsec.Result   `json:"result,omitempty"`
	Digests []string       `json:"digests,omitempty"`
	Created time.Time      `json:"created"`
	Changed time.Time      `json:"changed"`
	Expires time.Time      `json:"expires,omitzero"` // zero: no cap
	Starts  int            `json:"starts"`
	Steps   []dsec.Step    `json:"steps,omitempty"` // of the last creation or start
	// Isolated is what is between it and the machine's kernel: "namespaces", "gvisor", "vm".
	Isolated string `json:"isolated,omitempty"`

	Kept  *KeptDisk   `json:"kept,omitempty"`  // its disk, packed because it failed
	Blame *dsec.Blame `json:"blame,omitempty"` // what it is blamed on; nil: nothing

	Network *dsec.NetworkState `json:"network,omitempty"` // in force; nil: as in its spec, never changed
	Phase   *dsec.PhaseState   `json:"phase,omitempty"`   // in force; nil: it has none
	Grades  []dsec.GradeResult `json:"grades,omitempty"`  // the last ones, oldest first; a list leaves them out
}

// KeptDisk is the packed disk of a sandbox that failed.
type KeptDisk struct {
	Digest string    `json:"digest"`
	Tag    string    `json:"tag"`
	Until  time.Time `json:"until"`
}

func sandbox(p *dsecv1.Sandbox) Sandbox {
	s := Sandbox{ID: dsec.SandboxID(p.GetId()), Project: p.GetProject(), Node: dsec.NodeID(p.GetNode()),
		Spec: wire.SpecFrom(p.GetSpec()), State: dsec.State(p.GetState()), Result: wire.ResultFrom(p.GetResult()),
		Digests: p.GetDigests(), Created: wire.Instant(p.GetCreated()), Changed: wire.Instant(p.GetChanged()),
		Expires: wire.Instant(p.GetExpires()), Starts: int(p.GetStarts()), Steps: wire.StepsFrom(p.GetSteps()), Blame: wire.BlameFrom(p.GetBlame()),
		Network: wire.NetworkFrom(p.GetNetwork()), Phase: wire.PhaseFrom(p.GetPhase()), Grades: wire.GradesFrom(p.GetGrades()), Isolated: p.GetIsolated()}
	if k := p.GetKept(); k != nil {
		s.Kept = &KeptDisk{Digest: k.Digest, Tag: k.Tag, Until: wire.Instant(k.Until)}
	}
	return s
}

// Create returns when the sandbox runs.
func (c *Client) Create(ctx context.Context, s dsec.Spec) (Sandbox, error) {
	if s.CallID == "" {
		s.CallID = newKey()
	}
	var resp *dsecv1.CreateResponse
	err := c.retry(ctx, "create sandbox", func() (err error) {
		resp, err = c.sandboxes.Create(ctx, &dsecv1.CreateRequest{Spec: wire.Spec(s)})
		return err
	})
	return sandbox(resp.GetSandbox()), err
}

// Created is the outcome of one of many.
type Created struct {
	Index   int
	Sandbox Sandbox
	Err     error
}

// CreateMany creates a sandbox for each spec and calls fn with each outcome as
// it comes, until fn errs. After an error of CreateMany itself a call with the
// same specs and callID goes on where it stopped.
func (c *Client) CreateMany(ctx context.Context, specs []dsec.Spec, callID string, fn func(Created) error) error {
	if callID == "" {
		callID = newKey()
	}
	req := &dsecv1.CreateManyRequest{CallId: callID}
	for _, s := range specs {
		req.Specs = append(req.Specs, wire.Spec(s))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.sandboxes.CreateMany(ctx, req)
	if err != nil {
		return wire.FromConnect("create many", err)
	}
	defer stream.Close()
	seen := 0
	for stream.Receive() {
		m := stream.Msg()
		r := Created{Index: int(m.Index), Err: wire.Err(m.GetError())}
		if m.GetSandbox() != nil {
			r.Sandbox = sandbox(m.GetSandbox())
		}
		seen++
		if err := fn(r); err != nil {
			return err
		}
	}
	if err := stream.Err(); err != nil {
		return wire.FromConnect("create many", err)
	}
	if seen != len(specs) {
		return dsec.Errorf(dsec.Unavailable, "create many", callID, "%d of %d outcomes came", seen, len(specs))
	}
	return nil
}

// Get tells about a sandbox, also after its end.
func (c *Client) Get(ctx context.Context, id dsec.SandboxID) (Sandbox, error) {
	var resp *dsecv1.GetResponse
	err := c.retry(ctx, "get sandbox", func() (err error) {
		resp, err = c.sandboxes.Get(ctx, &dsecv1.GetRequest{Id: string(id)})
		return err
	})
	return sandbox(resp.GetSandbox()), err
}

// ListOptions select; zero fields match all.
type ListOptions struct {
	States  []dsec.State
	Labels  map[string]string
	Rollout string
	All     bool   // ended ones too
	Project string // admins: another project, "*" every one
}

// List returns every sandbox selected, newest first, and the nodes that did
// not answer.
func (c *Client) List(ctx context.Context, o ListOptions) (list []Sandbox, unreachable []string, err error) {
	req := &dsecv1.ListRequest{Labels: o.Labels, RolloutKey: o.Rollout, All: o.All, Project: o.Project}
	for _, s := range o.States {
		req.States = append(req.States, string(s))
	}
	for {
		var resp *dsecv1.ListResponse
		err := c.retry(ctx, "list sandboxes", func() (err error) {
			resp, err = c.sandboxes.List(ctx, req)
			return err
		})
		if err != nil {
			return nil, nil, err
		}
		for _, p := range resp.Sandboxes {
			list = append(list, sandbox(p))
		}
		if req.Page = resp.NextPage; req.Page == "" {
			return list, resp.Unreachable, nil
		}
	}
}

// change does one call that answers with a sandbox.
func change[R interface{ GetSandbox() *dsecv1.Sandbox }](ctx context.Context, c *Client, op string, fn func() (R, error)) (Sandbox, error) {
	var resp R
	err := c.retry(ctx, op, func() (err error) {
		resp, err = fn()
		return err
	})
	if err != nil {
		return Sandbox{}, err
	}
	return sandbox(resp.GetSandbox()), nil
}

// Start runs a stopped sandbox again, on its disk.
func (c *Client) Start(ctx context.Context, id dsec.SandboxID) (Sandbox, error) {
	req := &dsecv1.StartRequest{Id: string(id), CallId: newKey()}
	return change(ctx, c, "start sandbox", func() (*dsecv1.StartResponse, error) { return c.sandboxes.Start(ctx, req) })
}

// Stop ends a sandbox's processes and keeps its disk; cause "" is completed.
func (c *Client) Stop(ctx context.Context, id dsec.SandboxID, cause dsec.Cause) (Sandbox, error) {
	req := &dsecv1.StopRequest{Id: string(id), Cause: string(cause), CallId: newKey()}
	return change(ctx, c, "stop sandbox", func() (*dsecv1.StopResponse, error) { return c.sandboxes.Stop(ctx, req) })
}

// Pause freezes a sandbox.
func (c *Client) Pause(ctx context.Context, id dsec.SandboxID) (Sandbox, error) {
	req := &dsecv1.PauseRequest{Id: string(id), CallId: newKey()}
	return change(ctx, c, "pause sandbox", func() (*dsecv1.PauseResponse, error) { return c.sandboxes.Pause(ctx, req) })
}

// Suspend pauses a sandbox and has its memory be on disk only. Resume, and whatever else reaches
// into it, brings it back.
func (c *Client) Suspend(ctx context.Context, id dsec.SandboxID) (Sandbox, error) {
	req := &dsecv1.PauseRequest{Id: string(id), CallId: newKey(), ToDisk: true}
	return change(ctx, c, "suspend sandbox", func() (*dsecv1.PauseResponse, error) { return c.sandboxes.Pause(ctx, req) })
}

// Resume thaws a sandbox.
func (c *Client) Resume(ctx context.Context, id dsec.SandboxID) (Sandbox, error) {
	req := &dsecv1.ResumeRequest{Id: string(id), CallId: newKey()}
	return change(ctx, c, "resume sandbox", func() (*dsecv1.ResumeResponse, error) { return c.sandboxes.Resume(ctx, req) })
}

// Fork makes copies of a running or paused sandbox, which goes on: processes, memory and disk
// as they are at one moment, with names and random numbers of their own. All are made, or none.
func (c *Client) Fork(ctx context.Context, id dsec.SandboxID, count int) ([]Sandbox, error) {
	req := &dsecv1.ForkRequest{Id: string(id), Count: int32(count), CallId: newKey()}
	var resp *dsecv1.ForkResponse
	err := c.retry(ctx, "fork sandbox", func() (err error) {
		resp, err = c.sandboxes.Fork(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	out := make([]Sandbox, 0, len(resp.Sandboxes))
	for _, sb := range resp.Sandboxes {
		out = append(out, sandbox(sb))
	}
	return out, nil
}

// Renew moves the idle clock, and the lifetime from now on if it is not 0.
func (c *Client) Renew(ctx context.Context, id dsec.SandboxID, lifetime time.Duration) (Sandbox, error) {
	req := &dsecv1.RenewRequest{Id: string(id), Lifetime: wire.Seconds(lifetime), CallId: newKey()}
	return change(ctx, c, "renew sandbox", func() (*dsecv1.RenewResponse, error) { return c.sandboxes.Renew(ctx, req) })
}

// SetNetwork changes what a running sandbox may reach. When it returns, what the
// policy does not open is closed, and connections there are dead. A sandbox that was
// made without a network has none to change: IllegalState.
func (c *Client) SetNetwork(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy) (Sandbox, error) {
	req := wire.SetNetwork(id, p, newKey())
	return change(ctx, c, "set network of sandbox", func() (*dsecv1.SetNetworkResponse, error) { return c.sandboxes.SetNetwork(ctx, req) })
}

// SetPhase moves a sandbox to another of its phases. When it returns, everything
// that ran has been killed, and the phase is in force. The phase it is in changes
// nothing; one there is no way to is IllegalState. After any other error the sandbox
// stands still between the two until the same call succeeds (PhaseState.Moving).
func (c *Client) SetPhase(ctx context.Context, id dsec.SandboxID, name string) (Sandbox, error) {
	req := &dsecv1.SetPhaseRequest{Id: string(id), Name: name, CallId: newKey()}
	return change(ctx, c, "set phase of sandbox", func() (*dsecv1.SetPhaseResponse, error) { return c.sandboxes.SetPhase(ctx, req) })
}

// Delete removes a sandbox; existed is false if it was deleted before.
func (c *Client) Delete(ctx context.Context, id dsec.SandboxID) (existed bool, err error) {
	req := &dsecv1.DeleteRequest{Id: string(id), CallId: newKey()}
	var resp *dsecv1.DeleteResponse
	err = c.retry(ctx, "delete sandbox", func() (err error) {
		resp, err = c.sandboxes.Delete(ctx, req)
		return err
	})
	return resp.GetExisted(), err
}

// Egress is what a sandbox that lives has reached by name on ports 80 and 443, and what it
// was refused there.
func (c *Client) Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error) {
	var resp *dsecv1.EgressResponse
	err := c.retry(ctx, "read egress of sandbox", func() (err error) {
		resp, err = c.sandboxes.Egress(ctx, &dsecv1.EgressRequest{Id: string(id)})
		return err
	})
	return wire.EgressFrom(resp), err
}

// Stats samples what a sandbox uses.
func (c *Client) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	var resp *dsecv1.StatsResponse
	err := c.retry(ctx, "sample sandbox", func() (err error) {
		resp, err = c.sandboxes.Stats(ctx, &dsecv1.StatsRequest{Id: string(id)})
		return err
	})
	return wire.StatsFrom(resp), err
}
