package user

import (
	"context"
	"net/http"
	"strings"
	"testing"

	connectrpc "connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/dsec/v1/dsecv1connect"
	"github.com/opendsec/dsec/api/wire"
)

// TestTextsOfTypingErrorsSayWhatWasMeant, before a server is asked.
func TestTextsOfTypingErrorsSayWhatWasMeant(t *testing.T) {
	t.Setenv("DSEC_URL", "http://127.0.0.1:1")
	for _, c := range []struct {
		verb func() *cobra.Command
		args string
		want string
	}{
		{Run, "debian:12 --memory 1GiB -- true", `"--memory": options go before the image`},
		{Run, "debian:12 -it bash", `"-it": options go before the image`},
		{Exec, "work --tty bash", `"--tty": options go before the sandbox`},
		{Debug, "work --keep", `"--keep": options go before the sandbox`},
		{Create, "debian:12 --memory 64", "64 bytes, want at least 4.0 MiB: did you mean 64MiB?"},
		{Create, "debian:12 --disk 10", "10 bytes, want at least 1.0 MiB: did you mean 10MiB?"},
		{Commit, "work a:1 --scrub-answer nofile", `"nofile" is not a SHA-256; for a file write "@nofile"`},
		{Grade, "work --file x -- true", `"x" is not FILE:PATH`},
		{Grade, "work --path repo -- true", `"repo" is not an absolute, clean path`},
		{Grade, "work --where same --path /repo -- true", "are of a fresh sandbox, not of the same"},
	} {
		_, errs, err := said(t, c.verb, strings.Fields(c.args)...)
		if err == nil || !strings.Contains(errs+err.Error(), c.want) {
			t.Errorf("%s: %v\n%s", c.args, err, errs)
		}
	}
}

// TestWhatFollowsTheDashesIsTheCommand, whatever it looks like.
func TestWhatFollowsTheDashesIsTheCommand(t *testing.T) {
	for args, want := range map[string]string{"img -- --odd x": "--odd x", "-- img --odd": "--odd", "img sh -c true": "sh -c true", "img -- --": "--", "img": ""} {
		var got []string
		c := &cobra.Command{Use: "x", RunE: func(c *cobra.Command, args []string) (err error) {
			got, err = argvOf(c, args, "image")
			return err
		}}
		new(commandFlags).register(c)
		c.SetArgs(strings.Fields(args))
		if err := c.Execute(); err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %q, %v", args, got, err)
		}
	}
	var l limitFlag
	l.least = dsec.MinMemory
	for _, good := range []string{"64MiB", "4194304", "1KiB", "0"} { // what is too small with its unit was meant so: the spec says it
		if err := l.Set(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

// few makes no sandbox.
type few struct {
	dsecv1connect.UnimplementedSandboxesHandler
}

func (few) CreateMany(_ context.Context, req *dsecv1.CreateManyRequest, s *connectrpc.ServerStream[dsecv1.CreateManyResponse]) error {
	for i := range req.Specs {
		m := &dsecv1.CreateManyResponse{Index: int32(i), Outcome: &dsecv1.CreateManyResponse_Error{Error: wire.Detail(dsec.Errorf(dsec.ResourceExhausted, "admit sandbox", "", "full"))}}
		if i == 0 {
			m = &dsecv1.CreateManyResponse{Outcome: &dsecv1.CreateManyResponse_Sandbox{Sandbox: &dsecv1.Sandbox{Id: "s1"}}}
		}
		if err := s.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func TestHowManyWereNotMade(t *testing.T) {
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxesHandler(few{}))
	serve(t, mux)
	out, _, err := said(t, Create, "-n", "3", "img:1")
	if out != "s1\n" || err == nil || !strings.Contains(err.Error(), "2 of 3 were not made, the first: ") {
		t.Errorf("%q, %v", out, err)
	}
}
