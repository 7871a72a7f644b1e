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
