package gateway

import (
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// reopenEvery is how long events of a node that came back may be missed.
const reopenEvery = time.Second

// events keeps a stream open to every node that is alive and may have events
// the filter selects. It returns when those known now are open or failed; when
// they have told what happened before, the client is told so.
func (ses *session) events() {
	streams, absent := ses.openAll()
	ses.crew.Go(func() { ses.live(streams, absent) })
	ses.crew.Go(func() {
		tick := time.NewTicker(reopenEvery)
		defer tick.Stop()
		for {
			select {
			case <-ses.ctx.Done():
				return
			case <-tick.C:
				ses.openAll() // those that fail are tried again
			}
		}
	})
}

// live marks the end of the past. What a node sends is taken in order, so all
// of its past has been sent when its mark was seen.
func (ses *session) live(streams []*nodeStream, absent []string) {
	for _, ns := range streams {
		select {
		case <-ns.told:
			if !ns.past {
				absent = append(absent, string(ns.node))
			}
		case <-ses.ctx.Done():
			return
		}
	}
	_ = ses.send(&dsecv1.Frame{Item: &dsecv1.Frame_Live{Live: &dsecv1.Live{Absent: absent}}}) // the session has ended
}

// openAll opens what is not open yet and returns what is open, and the nodes
// of which nothing is.
func (ses *session) openAll() (streams []*nodeStream, absent []string) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for node, alive := range ses.eventNodes() {
		if !alive {
			mu.Lock()
			absent = append(absent, string(node))
			mu.Unlock()
			continue
		}
		wg.Go(func() {
			ns, err := ses.stream(ses.ctx, node)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				absent = append(absent, string(node))
				return
			}
			streams = append(streams, ns)
		})
	}
	wg.Wait()
	return streams, absent
}

// eventNodes are those of the sandboxes the filter names, or all, and whether
// they are alive.
func (ses *session) eventNodes() map[dsec.NodeID]bool {
	nodes := map[dsec.NodeID]bool{}
	for _, id := range ses.filter.Sandboxes {
		if _, node, err := dsec.ParseSandboxID(id); err == nil {
			nodes[node] = false
		}
	}
	for _, n := range ses.g.cfg.Cluster.Nodes() {
		id := dsec.NodeID(n.Id)
		if _, named := nodes[id]; named || len(ses.filter.Sandboxes) == 0 {
			nodes[id] = n.Alive
		}
	}
	return nodes
}

// eventsOf is what a node is asked for: at first what the client asked for, and
// after a break what has not come yet.
func (ses *session) eventsOf(node dsec.NodeID) *dsecv1.EventFilter {
	if ses.filter == nil {
		return nil
	}
	ses.mu.Lock()
	defer ses.mu.Unlock()
	f := proto.CloneOf(ses.filter)
	switch seen := ses.seen[node]; {
	case seen != nil:
		f.Since = seen
	case f.Since != nil:
		ses.seen[node] = f.Since
	default: // from now, by the node's own clock; by ours if it breaks before anything happened
		ses.seen[node] = timestamppb.Now()
	}
	return f
}
