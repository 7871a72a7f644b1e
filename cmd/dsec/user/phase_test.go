package user

import (
	"bytes"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func TestPhasesOfAFile(t *testing.T) {
	all, err := parsePhases([]byte(`[{"name": "setup"}, {"name": "code", "users": ["a"], "user": "a", "read_only": ["/r"], "network": {"mode": "none"}, "limits": {"pids": 9}}]`))
	if err != nil || len(all) != 2 || all[1].Limits.Pids != 9 || all[1].Network.Mode != dsec.NetworkNone || all[1].ReadOnly[0] != "/r" {
		t.Fatalf("%+v %v", all, err)
	}
	for _, bad := range []string{"", "{}", `[{"name": "a", "readonly": ["/x"]}]`, `[] []`} {
		if all, err := parsePhases([]byte(bad)); err == nil {
			t.Errorf("%s is %+v", bad, all)
		}
	}
}

func TestAPhaseIsShownWithWhereItMayGo(t *testing.T) {
	sb := client.Sandbox{Spec: dsec.Spec{Phases: []dsec.Phase{{Name: "a"}, {Name: "b", Back: []string{"a"}}, {Name: "c"}}}, Phase: &dsec.PhaseState{Name: "b", Generation: 2}}
	var out bytes.Buffer
	if err := describePhase(&out, sb); err != nil || out.String() != "b, generation 2\n  may go to a\n  may go to c\n" {
		t.Errorf("%q %v", out.String(), err)
	}
	sb.Phase.Moving = "c"
	out.Reset()
	if err := describePhase(&out, sb); err != nil || !strings.Contains(out.String(), "on its way to c") {
		t.Errorf("%q %v", out.String(), err)
	}
}
