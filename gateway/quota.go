package gateway

import (
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// quota bounds the live sandboxes of a project. What is being created counts.
type quota struct {
	mu       sync.Mutex
	reserved map[string]int // creates at work, by project
}

const retryQuota = time.Second

// take reserves one sandbox until release.
func (q *quota) take(project string, most int, live func(project string) int) (release func(), err error) {
	if most == 0 {
		return func() {}, nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	n := live(project) // under the lock: what just became live may count twice for a moment, but is never missed
	if n+q.reserved[project] >= most {
		d := wire.Detail(dsec.Errorf(dsec.ResourceExhausted, "create sandbox", project, "the project has %d of %d sandboxes",
			n+q.reserved[project], most))
		d.RetryAfter = wire.Seconds(retryQuota)
		return nil, wire.Err(d)
	}
	q.reserved[project]++
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.reserved[project]--; q.reserved[project] == 0 {
			delete(q.reserved, project)
		}
	}, nil
}
