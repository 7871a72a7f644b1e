package gateway_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/iam"
)

func TestThePastEndsWithAMark(t *testing.T) {
	e := withNode(t)
	c, ctx := e.remote(iam.User, "p"), t.Context()
	var want []dsec.SandboxID
	for range 3 {
		sb := e.sandbox(c)
		if _, err := c.Delete(ctx, sb.ID); err != nil {
			t.Fatal(err)
		}
		want = append(want, sb.ID)
	}
	_ = e.sandbox(e.remote(iam.User, "theirs"))
	deletedOf := func(events []dsec.Event) (ids []dsec.SandboxID) {
		for _, ev := range events {
			if ev.To == dsec.Deleted {
				ids = append(ids, ev.Sandbox)
			}
		}
		return ids
	}
	all, absent, err := c.Past(ctx, client.Events{})
	if err != nil || len(absent) > 0 || !slices.Equal(deletedOf(all), want) {
		t.Fatalf("%v, absent %v, %v, want the ends of %v", deletedOf(all), absent, err, want)
	}
	one, _, err := c.Past(ctx, client.Events{Sandboxes: want[1:2], Types: []dsec.EventType{dsec.EventState}})
	if err != nil || len(one) < 2 || len(deletedOf(one)) != 1 || slices.ContainsFunc(one, func(ev dsec.Event) bool { return ev.Sandbox != want[1] }) {
		t.Fatalf("%+v, %v", one, err)
	}
	none, _, err := c.Past(ctx, client.Events{Since: time.Now()})
	if err != nil || len(none) > 0 {
		t.Fatalf("%+v, %v", none, err)
	}

	events := make(chan dsec.Event, 1000)
	s, err := c.OpenSession(ctx, &client.Events{Since: time.Unix(1, 0)}, func(ev dsec.Event) { events <- ev })
	must(t, err)
	defer s.Close()
	if _, err := s.Live(ctx); err != nil {
		t.Fatal(err)
	}
	past := len(events)
	if past != len(all) {
		t.Errorf("%d events before the mark, want %d", past, len(all))
	}
	sb := e.sandbox(c)
	for range past {
		<-events
	}
	if ev := <-events; ev.Sandbox != sb.ID {
		t.Errorf("after the mark: %+v", ev)
	}
}

func TestAnAbsentNodeIsNamedAtTheEndOfThePast(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	must(t, e.api.Close())
	for _, f := range []client.Events{{}, {Sandboxes: []dsec.SandboxID{sb.ID}}} {
		_, absent, err := c.Past(t.Context(), f)
		if err != nil || !slices.Equal(absent, []dsec.NodeID{"nodea"}) {
			t.Errorf("absent %v, %v", absent, err)
		}
	}
	other := dsec.NewSandboxID("elsewhere")
	if _, absent, err := c.Past(t.Context(), client.Events{Sandboxes: []dsec.SandboxID{other}}); err != nil || !slices.Equal(absent, []dsec.NodeID{"elsewhere"}) {
		t.Errorf("a node nobody knows: absent %v, %v", absent, err)
	}
}

func TestAClosedSessionHasNoPast(t *testing.T) {
	e := start(t)
	s, err := e.local().OpenSession(t.Context(), nil, nil)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.Live(ctx)
	wantClass(t, err, dsec.Timeout)
	must(t, s.Close())
	_, err = s.Live(t.Context())
	wantClass(t, err, dsec.Canceled)
}

func TestEventsComeOnceWhenANodeComesBack(t *testing.T) {
	for _, since := range []time.Time{time.Unix(1, 0), {}} { // zero: from now
		e := start(t)
		c, ctx := e.local(), t.Context()
		before := e.sandbox(c)
		events := make(chan dsec.Event, 1000)
		s, err := c.OpenSession(ctx, &client.Events{Since: since}, func(ev dsec.Event) { events <- ev })
		must(t, err)
		defer s.Close()
		if _, err := s.Live(ctx); err != nil {
			t.Fatal(err)
		}
		must(t, e.api.Close())
		// What happens while nobody looks is told when the node is back.
		sb, err := e.node.Create(ctx, "default", dsec.Spec{Tier: dsec.TierContainer, Image: "base:1"})
		must(t, err)
		e.startNode()
		_, err = e.node.Delete(ctx, sb.ID, "")
		must(t, err)
		count := map[dsec.SandboxID]map[dsec.State]int{}
		for count[sb.ID][dsec.Deleted] == 0 {
			select {
			case ev := <-events:
				if count[ev.Sandbox] == nil {
					count[ev.Sandbox] = map[dsec.State]int{}
				}
				if count[ev.Sandbox][ev.To]++; count[ev.Sandbox][ev.To] > 1 {
					t.Fatalf("since %v: twice %+v", since, ev)
				}
			case <-time.After(15 * time.Second):
				t.Fatalf("since %v: got %v", since, count)
			}
		}
		if count[sb.ID][dsec.Running] != 1 {
			t.Errorf("since %v: missed what happened meanwhile: %v", since, count)
		}
		if _, told := count[before.ID]; told == since.IsZero() {
			t.Errorf("since %v: what was before is told: %v", since, told)
		}
	}
}
