package user

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	connectrpc "connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/dsec/v1/dsecv1connect"
	"github.com/opendsec/dsec/api/wire"
)

// slow is a server whose registry is away: creations wait, and events say so.
type slow struct {
	dsecv1connect.UnimplementedSandboxesHandler
	dsecv1connect.UnimplementedEventsHandler
	enough <-chan struct{} // ends the creation
	told   chan struct{}   // closed when events were sent
}

func (s slow) Create(ctx context.Context, _ *dsecv1.CreateRequest) (*dsecv1.CreateResponse, error) {
	select {
	case <-s.enough:
		return &dsecv1.CreateResponse{Sandbox: &dsecv1.Sandbox{Id: "s1"}}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s slow) Open(ctx context.Context, req *dsecv1.OpenRequest, out *connectrpc.ServerStream[dsecv1.Frame]) error {
	if err := out.Send(&dsecv1.Frame{Item: &dsecv1.Frame_Hello{Hello: &dsecv1.Hello{Session: req.Session}}}); err != nil {
		return err
	}
	for _, detail := range []string{"image other/x:1: convert", "image docker.io/library/debian:12: resolve"} {
		e := wire.Event(dsec.Event{Type: dsec.EventNote, Detail: detail, Time: time.Now()})
		if err := out.Send(&dsecv1.Frame{Item: &dsecv1.Frame_Event{Event: e}}); err != nil {
			return err
		}
	}
	close(s.told)
	<-ctx.Done()
	return nil
}

func slowly(t *testing.T, enough <-chan struct{}) slow {
	t.Helper()
	old := patience
	patience.log = 10 * time.Millisecond
	t.Cleanup(func() { patience = old })
	s := slow{enough: enough, told: make(chan struct{})}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxesHandler(struct{ dsecv1connect.SandboxesHandler }{s}))
	mux.Handle(dsecv1connect.NewEventsHandler(struct{ dsecv1connect.EventsHandler }{s}))
	serve(t, mux)
	return s
}

// TestACreationThatTakesLongSaysWhatItWaitsFor: not of other images, and not in
// JSON's way.
func TestACreationThatTakesLongSaysWhatItWaitsFor(t *testing.T) {
	const ref = "docker.io/library/debian:12"
	enough := make(chan struct{})
	s := slowly(t, enough)
	go func() {
		<-s.told
		time.Sleep(100 * time.Millisecond) // for the client to read it
		close(enough)
	}()
	out, errs, err := said(t, Create, ref)
	want := "dsec: waiting for a sandbox of " + ref + "; dsec events shows how far it is\ndsec: pulling " + ref + ": resolve\n"
	if err != nil || out != "s1\n" || errs != want {
		t.Errorf("%v\n%q\n%q, want %q", err, out, errs, want)
	}
	if _, errs, err := said(t, Create, ref, "-o", "json"); err != nil || errs != "" {
		t.Errorf("%v, %q", err, errs)
	}
}

// TestWhoGivesUpIsToldTheLastThingKnown, by create and by run.
func TestWhoGivesUpIsToldTheLastThingKnown(t *testing.T) {
	for _, v := range []func() *cobra.Command{Create, Run} {
		s := slowly(t, nil)
		ctx, interrupt := context.WithCancel(t.Context())
		go func() {
			<-s.told
			time.Sleep(100 * time.Millisecond) // for the client to read it
			interrupt()
		}()
		_, errs, err := saidIn(t, ctx, v, "docker.io/library/debian:12", "--", "true")
		if err == nil || !strings.Contains(errs, "dsec: last heard: pulling docker.io/library/debian:12: resolve\n") {
			t.Errorf("%v\n%s", err, errs)
		}
	}
}

func TestWaitingOnATerminalTakesOneLine(t *testing.T) {
	var b bytes.Buffer
	w := &waiting{w: &b, terminal: true, images: []dsec.LayerRef{"img"}}
	w.end(true) // nothing was said
	for _, phase := range []string{"resolve", "convert\x1b[2J"} {
		w.event(dsec.Event{Detail: "image img: " + phase})
	}
	w.end(false)
	if want := "\r\x1b[Kdsec: pulling img: resolve\r\x1b[Kdsec: pulling img: convert?[2J\r\x1b[K"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}
