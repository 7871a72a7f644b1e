package gateway

import (
	"context"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// functions is the service of that name.
type functions struct{ *Gateway }

const (
	callsAtOnce = 1024 // of one project: more only wait at the nodes
	callWithin  = dsec.MaxCallWall + 15*time.Minute
)

// callQuota bounds the calls of each project that are at work.
type callQuota struct {
	mu     sync.Mutex
	atWork map[string]int
}

func (q *callQuota) take(project string) (release func(), err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.atWork[project] >= callsAtOnce {
		d := wire.Detail(dsec.Errorf(dsec.ResourceExhausted, "call", project, "the project has %d calls at work, which is the most", callsAtOnce))
		d.RetryAfter = wire.Seconds(retryQuota)
		return nil, wire.Err(d)
	}
	if q.atWork == nil {
		q.atWork = map[string]int{}
	}
	q.atWork[project]++
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.atWork[project]--; q.atWork[project] == 0 {
			delete(q.atWork, project)
		}
	}, nil
}

// Call makes a stateless call in the caller's project.
func (f *functions) Call(ctx context.Context, req *dsecv1.CallRequest) (*dsecv1.CallResponse, error) {
	c := wire.CallFrom(req)
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if req.CallId == "" {
		req.CallId = "g" + dsec.Random(24) // a retry inside the platform must find what the first try began
	}
	project := principal(ctx).Project
	release, err := f.calls.take(project)
	if err != nil {
		return nil, err
	}
	defer release()
	ctx, cancel := within(ctx, callWithin)
	defer cancel()
	resp := &dsecv1.CallResponse{}
	return resp, f.cfg.Cluster.CallFunction(ctx, project, req, resp)
}
