package nodeapi

import (
	"net/http/httptest"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// TestTheNodeChecksWhatTheGatewayDid: it need not believe a gateway. Nothing
// serves here: a request that is let through would panic.
func TestTheNodeChecksWhatTheGatewayDid(t *testing.T) {
	s := &Server{}
	for name, x := range map[string]struct {
		verb verb
		m    proto.Message
	}{
		"number": {unary(s.signal), &dsecv1.SignalRequest{Signal: -1}},
		"offset": {unary(s.writeStdin), &dsecv1.WriteStdinRequest{Offset: proto.Int64(-5)}},
		"NUL":    {unary(s.stat), &dsecv1.StatRequest{Path: "/a\x00b"}},
		"length": {unary(s.removeLayer), &dsecv1.RemoveLayerRequest{Ref: strings.Repeat("x", 1000)}},
		"list":   {unary(s.subscriptions), &dsecv1.MuxCall{Acks: make([]*dsecv1.ExecAck, 20_000)}},
	} {
		body, err := proto.Marshal(x.m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := x.verb(t.Context(), caller{}, body); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	body, err := proto.Marshal(&dsecv1.WatchRequest{Path: strings.Repeat("x", 5000)})
	if err != nil {
		t.Fatal(err)
	}
	r := httptest.NewRequest("POST", "/watch", strings.NewReader(string(body)))
	if err := request(httptest.NewRecorder(), r, &dsecv1.WatchRequest{}); dsec.ClassOf(err) != dsec.Invalid {
		t.Errorf("stream: %v", err)
	}
	for _, q := range []string{"path=/a%00", "offset=-1", "mode=99999", "user=" + strings.Repeat("x", 300)} {
		p := parameters(httptest.NewRequest("GET", "/files?"+q, nil))
		p.offset("offset", 0, 0)
		p.mode("mode")
		if dsec.ClassOf(p.err) != dsec.Invalid {
			t.Errorf("%.20s: %v", q, p.err)
		}
	}
}
