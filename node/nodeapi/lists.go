package nodeapi

import (
	"slices"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/node"
)

// Bounds of a list, so that no sandbox keeps the others from being listed.
const (
	listedSpec  = 8 << 10  // bytes of a spec; beyond it what is long is left out
	listedBytes = 48 << 20 // of the answer; beyond it the oldest are left out
)

// listed makes the answer of a list: live ones and then the newest first, as
// long as there is room.
func (s *Server) listed(list []node.Sandbox) *dsecv1.NodeListReply {
	out := &dsecv1.NodeListReply{}
	room := listedBytes
	for i, sb := range slices.Backward(list) {
		m := s.brief(sb)
		if room -= proto.Size(m); room < 0 {
			s.log.Warn("list cut short", "left out", i+1, "bytes", listedBytes)
			break
		}
		out.Sandboxes = append(out.Sandboxes, m)
	}
	slices.Reverse(out.Sandboxes)
	return out
}

// brief leaves out of a large spec what a list is not asked for: Get has it.
func (s *Server) brief(sb node.Sandbox) *dsecv1.Sandbox {
	m := s.message(sb)
	m.Grades = nil
	for _, cut := range []func(*dsecv1.Spec){
		func(p *dsecv1.Spec) { p.Env, p.Command, p.Mounts = nil, nil, nil },
		func(p *dsecv1.Spec) { p.Labels, p.Layers = nil, nil },
		func(p *dsecv1.Spec) { // from before there was a most
			p.User, p.Workdir, p.Hostname, p.RolloutKey, p.CallId, p.Image = "", "", "", "", "", ""
		},
	} {
		if proto.Size(m.Spec) <= listedSpec {
			break
		}
		cut(m.Spec)
	}
	return m
}
