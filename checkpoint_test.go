package dsec

import (
	"reflect"
	"testing"
	"time"
)

// Every field of a spec is either what the checkpoint says, or one that may be chosen: a new one has to be thought of.
func TestGoesOnFromEveryField(t *testing.T) {
	of := Spec{Tier: TierMicroVM, Image: "sha256:base", Layers: []LayerRef{"sha256:top"}, Command: []string{"a"}, Env: map[string]string{"A": "1"}, User: "u",
		Workdir: "/w", Network: NetworkOpen, Limits: Limits{CPU: 1, Memory: 1 << 30}, Lifetimes: Lifetimes{Idle: time.Hour}, Profile: "build", NoNewPrivs: true, OOM: OOMExec,
		Labels: map[string]string{"l": "1"}, RolloutKey: "r", Watch: []string{"/tests/**"}}
	got, err := (Spec{Checkpoint: "sha256:c", CallID: "id"}).GoesOnFrom(of)
	want := of
	want.Checkpoint, want.CallID = "sha256:c", "id"
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v %v", got, err)
	}
	if again, err := got.GoesOnFrom(of); err != nil || !reflect.DeepEqual(again, want) {
		t.Errorf("what was completed is refused: %+v %v", again, err)
	}
	others := Spec{Name: "n", Tier: TierContainer, Isolation: IsolationGVisor, Boot: BootCold, Image: "i", Layers: []LayerRef{"l"}, Command: []string{"b"}, Env: map[string]string{"A": "2"},
		User: "v", Workdir: "/x", Hostname: "h", Network: NetworkAllow, Allow: []NetworkRule{{Domain: "a.b"}}, Cutoff: time.Unix(1, 0), MirrorDeny: []string{"pypi:x"},
		Limits: Limits{Pids: 7}, Lifetimes: Lifetimes{Retention: time.Minute}, Profile: "pwn", NoNewPrivs: true, OOM: OOMSandbox, Mounts: []HostMount{{"/a", "/b"}},
		Phases: []Phase{{Name: "p"}}, Labels: map[string]string{"m": "2"}, CallID: "c", RolloutKey: "k", Checkpoint: "sha256:c", Watch: []string{"/x"}}
	v := reflect.ValueOf(others)
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		if v.Field(i).IsZero() {
			t.Fatalf("%s: this test tries no other value", name)
		}
		asked := Spec{Checkpoint: "sha256:c"}
		if name == "Allow" || name == "Cutoff" || name == "MirrorDeny" {
			asked.Network = NetworkAllow
		}
		reflect.ValueOf(&asked).Elem().Field(i).Set(v.Field(i))
		from := of
		if name == "NoNewPrivs" {
			from.NoNewPrivs = false
		}
		got, err := asked.GoesOnFrom(from)
		if !chosen[name] {
			if ClassOf(err) != Invalid {
				t.Errorf("%s: %v, want invalid", name, err)
			}
			continue
		}
		is := reflect.ValueOf(got).Field(i).Interface()
		if name == "Lifetimes" {
			if err != nil || got.Lifetimes.Retention != time.Minute || got.Lifetimes.Idle != time.Hour {
				t.Errorf("%+v %v", got.Lifetimes, err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(is, v.Field(i).Interface()) {
			t.Errorf("%s: %v %v", name, is, err)
		}
	}
	if _, err := (Spec{Network: NetworkNone}).GoesOnFrom(of); ClassOf(err) != Invalid {
		t.Errorf("a cable taken away: %v", err)
	}
	if _, err := (Spec{Allow: []NetworkRule{{Domain: "a.b"}}}).GoesOnFrom(of); ClassOf(err) != Invalid {
		t.Errorf("rules without a mode: %v", err)
	}
}
