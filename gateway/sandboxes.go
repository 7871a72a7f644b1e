package gateway

import (
	"context"
	"sort"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/iam"
)

// sandboxes is the service of that name.
type sandboxes struct{ *Gateway }

// within gives a call a deadline if its caller set none.
func within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, d)
}

// on routes a call about a sandbox to the node its id names.
func (g *Gateway) on(ctx context.Context, sandbox, verb string, req, resp proto.Message) error {
	_, node, err := dsec.ParseSandboxID(sandbox)
	if err != nil {
		return err
	}
	err = g.cfg.Cluster.Call(ctx, node, verb, scope(ctx), req, resp)
	if dsec.ClassOf(err) == dsec.NotFound && unknownNode(err, node) {
		return dsec.Errorf(dsec.NotFound, "find sandbox", sandbox, "no such sandbox")
	}
	return err
}

// unknownNode: the id is well formed but names a node nobody heard of.
func unknownNode(err error, node dsec.NodeID) bool {
	e, ok := err.(*dsec.Error)
	return ok && e.Object == string(node)
}

// create makes one sandbox, within the quota.
func (g *Gateway) create(ctx context.Context, spec *dsecv1.Spec) (*dsecv1.Sandbox, error) {
	begun := time.Now()
	s, err := g.goesOn(ctx, wire.SpecFrom(spec))
	if err != nil {
		return nil, err
	}
	if err := s.Validate(); err != nil {
		return nil, err
	}
	spec = wire.Spec(s)
	if spec.CallId == "" {
		spec.CallId = "g" + dsec.Random(24) // a retry inside the platform must find what the first try made
	}
	project := principal(ctx).Project
	release, err := g.quota.take(project, g.cfg.MaxLive, g.cfg.Cluster.Live)
	if err != nil {
		g.metrics.created(err, nil, time.Since(begun))
		return nil, err
	}
	defer release()
	ctx, cancel := within(ctx, createWithin)
	defer cancel()
	sb, err := g.cfg.Cluster.Create(ctx, project, spec)
	g.metrics.created(err, sb.GetSteps(), time.Since(begun))
	return sb, err
}

func (s *sandboxes) Create(ctx context.Context, req *dsecv1.CreateRequest) (*dsecv1.CreateResponse, error) {
	sb, err := s.create(ctx, req.Spec)
	if err != nil {
		return nil, err
	}
	return &dsecv1.CreateResponse{Sandbox: sb}, nil
}

// batch spells out the specs of a CreateMany.
func batch(req *dsecv1.CreateManyRequest) ([]*dsecv1.Spec, error) {
	bad := func(format string, args ...any) ([]*dsecv1.Spec, error) {
		return nil, dsec.Errorf(dsec.Invalid, "create many", "", format, args...)
	}
	specs := req.Specs
	switch {
	case len(specs) == 0:
		return bad("no spec is given")
	case req.Count < 0, req.Count > 0 && len(specs) != 1:
		return bad("count %d with %d specs: count repeats one spec", req.Count, len(specs))
	case max(int(req.Count), len(specs)) > maxBatchItems:
		return bad("%d sandboxes, at most %d", max(int(req.Count), len(specs)), maxBatchItems)
	case req.Count > 0 && int64(req.Count)*int64(proto.Size(specs[0])) > maxSpelled:
		return bad("%d times a spec of %d bytes, at most %d bytes in all", req.Count, proto.Size(specs[0]), int64(maxSpelled))
	case req.Count > 0 && specs[0].GetCallId() != "" && req.Count != 1:
		return bad("one key for %d sandboxes: set call_id of the request instead", req.Count)
	}
	if req.Count > 0 {
		specs = make([]*dsecv1.Spec, req.Count)
		for i := range specs {
			specs[i] = req.Specs[0]
		}
	}
	base := req.CallId
	if base == "" {
		base = "g" + dsec.Random(24)
	}
	out := make([]*dsecv1.Spec, len(specs))
	for i, s := range specs {
		c, _ := proto.Clone(s).(*dsecv1.Spec)
		if c == nil {
			c = &dsecv1.Spec{}
		}
		if c.CallId == "" {
			c.CallId = base + "." + strconv.Itoa(i)
		}
		out[i] = c
	}
	return out, nil
}

func (s *sandboxes) CreateMany(ctx context.Context, req *dsecv1.CreateManyRequest, stream *connect.ServerStream[dsecv1.CreateManyResponse]) error {
	specs, err := batch(req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next, results := make(chan int), make(chan *dsecv1.CreateManyResponse)
	var wg sync.WaitGroup
	for range min(batchAtOnce, len(specs)) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range next {
				results <- s.item(ctx, i, specs[i])
			}
		}()
	}
	go func() {
		defer close(results)
		defer wg.Wait()
		defer close(next)
		for i := range specs {
			select {
			case next <- i:
			case <-ctx.Done():
				return
			}
		}
	}()
	var failed error
	for r := range results { // to the end, so that no worker is left
		if failed == nil {
			if failed = stream.Send(r); failed != nil {
				cancel(failed)
			}
		}
	}
	if failed == nil && ctx.Err() != nil {
		return dsec.E(dsec.ClassOf(ctx.Err()), "create many", "", context.Cause(ctx))
	}
	return failed
}

func (s *sandboxes) item(ctx context.Context, i int, spec *dsecv1.Spec) *dsecv1.CreateManyResponse {
	r := &dsecv1.CreateManyResponse{Index: int32(i)}
	sb, err := s.create(ctx, spec)
	if err != nil {
		r.Outcome = &dsecv1.CreateManyResponse_Error{Error: wire.Detail(err)}
	} else {
		r.Outcome = &dsecv1.CreateManyResponse_Sandbox{Sandbox: sb}
	}
	return r
}

func (s *sandboxes) Get(ctx context.Context, req *dsecv1.GetRequest) (*dsecv1.GetResponse, error) {
	resp := &dsecv1.GetResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbGet, req, resp)
}

const maxPage = 1000

// List pages by creation time and id, newest first.
func (s *sandboxes) List(ctx context.Context, req *dsecv1.ListRequest) (*dsecv1.ListResponse, error) {
	project := principal(ctx).Project
	if req.Project != "" && req.Project != project {
		if err := admin(ctx, "list sandboxes of another project"); err != nil {
			return nil, err
		}
		project = req.Project
	}
	if project == "*" {
		project = ""
	} else if !iam.ValidProject(project) {
		return nil, dsec.Errorf(dsec.Invalid, "list sandboxes", dsec.Quote(project), "not a project")
	}
	if _, err := wire.States(req.States); err != nil {
		return nil, err
	}
	list, unreachable := s.cfg.Cluster.List(ctx, project, &dsecv1.NodeList{States: req.States, Labels: req.Labels,
		RolloutKey: req.RolloutKey, All: req.All})
	sort.Slice(list, func(i, j int) bool { return pageKey(list[i]) > pageKey(list[j]) })
	if req.Page != "" {
		list = list[sort.Search(len(list), func(i int) bool { return pageKey(list[i]) < req.Page }):]
	}
	size := maxPage
	if req.PageSize > 0 {
		size = min(maxPage, int(req.PageSize))
	}
	resp := &dsecv1.ListResponse{Unreachable: unreachable}
	if len(list) > size {
		list = list[:size]
		resp.NextPage = pageKey(list[size-1])
	}
	resp.Sandboxes = list
	return resp, nil
}

// pageKey orders by time, then id.
func pageKey(s *dsecv1.Sandbox) string {
	return s.GetCreated().AsTime().UTC().Format("20060102150405.000000000") + "." + s.GetId()
}

func (s *sandboxes) Start(ctx context.Context, req *dsecv1.StartRequest) (*dsecv1.StartResponse, error) {
	ctx, cancel := within(ctx, createWithin)
	defer cancel()
	resp := &dsecv1.StartResponse{}
	err := s.on(ctx, req.Id, wire.VerbStart, req, resp)
	return resp, s.saw(resp.Sandbox, err)
}

// saw keeps the count of live sandboxes right.
func (g *Gateway) saw(sb *dsecv1.Sandbox, err error) error {
	if err == nil && sb != nil {
		g.cfg.Cluster.Saw(sb)
	}
	return err
}

func (s *sandboxes) Stop(ctx context.Context, req *dsecv1.StopRequest) (*dsecv1.StopResponse, error) {
	if err := verdict(req.Cause); err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, createWithin)
	defer cancel()
	resp := &dsecv1.StopResponse{}
	err := s.on(ctx, req.Id, wire.VerbStop, req, resp)
	return resp, s.saw(resp.Sandbox, err)
}

// verdict: an owner may say how its own run went, not what the platform did.
func verdict(cause string) error {
	c := dsec.Cause(cause)
	switch {
	case c == "", c == dsec.CauseCompleted, c == dsec.CauseCancelled:
		return nil
	case c == dsec.CauseAgentError, c == dsec.CauseAgentTimeout, c == dsec.CauseAgentDamage, c.Outcome() == dsec.OutcomeTask:
		for _, known := range dsec.Causes {
			if c == known {
				return nil
			}
		}
	}
	return dsec.Errorf(dsec.Invalid, "stop sandbox", dsec.Quote(cause), "not a cause an owner can give")
}

func (s *sandboxes) Delete(ctx context.Context, req *dsecv1.DeleteRequest) (*dsecv1.DeleteResponse, error) {
	ctx, cancel := within(ctx, createWithin)
	defer cancel()
	resp := &dsecv1.DeleteResponse{}
	err := s.on(ctx, req.Id, wire.VerbDelete, req, resp)
	return resp, s.saw(&dsecv1.Sandbox{Id: req.Id, State: string(dsec.Deleted)}, err)
}

func (s *sandboxes) Pause(ctx context.Context, req *dsecv1.PauseRequest) (*dsecv1.PauseResponse, error) {
	resp := &dsecv1.PauseResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbPause, req, resp)
}

func (s *sandboxes) Resume(ctx context.Context, req *dsecv1.ResumeRequest) (*dsecv1.ResumeResponse, error) {
	resp := &dsecv1.ResumeResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbResume, req, resp)
}

// Fork makes sandboxes, within the quota.
func (s *sandboxes) Fork(ctx context.Context, req *dsecv1.ForkRequest) (*dsecv1.ForkResponse, error) {
	if req.Count == 0 {
		req.Count = 1
	}
	if req.Count < 1 || req.Count > maxForks {
		return nil, dsec.Errorf(dsec.Invalid, "fork sandbox", req.Id, "%d copies, want 1 to %d", req.Count, maxForks)
	}
	if req.CallId == "" {
		req.CallId = "g" + dsec.Random(24) // a retry inside the platform must find what the first try made
	}
	for range req.Count {
		release, err := s.quota.take(principal(ctx).Project, s.cfg.MaxLive, s.cfg.Cluster.Live)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	ctx, cancel := within(ctx, createWithin)
	defer cancel()
	resp := &dsecv1.ForkResponse{}
	err := s.on(ctx, req.Id, wire.VerbFork, req, resp)
	for _, sb := range resp.Sandboxes {
		_ = s.saw(sb, err)
	}
	return resp, err
}

// maxForks is how many copies a node makes in one call.
const maxForks = 1000

func (s *sandboxes) Renew(ctx context.Context, req *dsecv1.RenewRequest) (*dsecv1.RenewResponse, error) {
	resp := &dsecv1.RenewResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbRenew, req, resp)
}

func (s *sandboxes) SetNetwork(ctx context.Context, req *dsecv1.SetNetworkRequest) (*dsecv1.SetNetworkResponse, error) {
	resp := &dsecv1.SetNetworkResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbSetNetwork, req, resp)
}

func (s *sandboxes) SetPhase(ctx context.Context, req *dsecv1.SetPhaseRequest) (*dsecv1.SetPhaseResponse, error) {
	ctx, cancel := within(ctx, phaseWithin)
	defer cancel()
	resp := &dsecv1.SetPhaseResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbSetPhase, req, resp)
}

func (s *sandboxes) Commit(ctx context.Context, req *dsecv1.CommitRequest) (*dsecv1.CommitResponse, error) {
	ctx, cancel := within(ctx, commitWithin)
	defer cancel()
	resp := &dsecv1.CommitResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbCommit, req, resp)
}

func (s *sandboxes) Changes(ctx context.Context, req *dsecv1.ChangesRequest) (*dsecv1.ChangesResponse, error) {
	ctx, cancel := within(ctx, commitWithin)
	defer cancel()
	resp := &dsecv1.ChangesResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbChanges, req, resp)
}

func (s *sandboxes) Grade(ctx context.Context, req *dsecv1.GradeRequest) (*dsecv1.GradeResponse, error) {
	if req.CallId == "" {
		req.CallId = "g" + dsec.Random(24) // a retry inside the platform must find what the first try began
	}
	if req.Where != string(dsec.GradeSame) { // the grader's is a sandbox as others are
		release, err := s.quota.take(principal(ctx).Project, s.cfg.MaxLive, s.cfg.Cluster.Live)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	ctx, cancel := within(ctx, commitWithin)
	defer cancel()
	resp := &dsecv1.GradeResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbGrade, req, resp)
}

func (s *sandboxes) Egress(ctx context.Context, req *dsecv1.EgressRequest) (*dsecv1.EgressResponse, error) {
	resp := &dsecv1.EgressResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbEgress, req, resp)
}

func (s *sandboxes) Stats(ctx context.Context, req *dsecv1.StatsRequest) (*dsecv1.StatsResponse, error) {
	resp := &dsecv1.StatsResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbStats, req, resp)
}

func (s *sandboxes) Findings(ctx context.Context, req *dsecv1.FindingsRequest) (*dsecv1.FindingsResponse, error) {
	resp := &dsecv1.FindingsResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbFindings, req, resp)
}

func (s *sandboxes) Audit(ctx context.Context, req *dsecv1.AuditRequest, stream *connect.ServerStream[dsecv1.AuditResponse]) error {
	r, closer, err := s.open(ctx, req.Id, wire.PathAudit, req)
	if err != nil {
		return err
	}
	defer closer.Close()
	return relay(r, closer, func() *dsecv1.AuditResponse { return &dsecv1.AuditResponse{} }, stream.Send, &dsecv1.AuditResponse{})
}
