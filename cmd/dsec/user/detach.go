package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// started is what exec -d prints as JSON.
type started struct {
	Sandbox string `json:"sandbox"`
	Exec    string `json:"exec"`
}

// startOnly starts a command and leaves it.
func startOnly(ctx context.Context, c *cobra.Command, cl *client.Client, id dsec.SandboxID, s process.Spec, f commandFlags) error {
	if f.interactive || f.tty {
		return usage("run command", "--detach goes with neither -i nor -t")
	}
	s.Timeout = f.timeout
	p, err := cl.Exec(ctx, id, s)
	if err != nil {
		return startFailed(c.ErrOrStderr(), err, s.Argv)
	}
	return show(c, started{string(id), p.ID}, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, p.ID)
		return err
	})
}

func usage(op, why string) error { return dsec.Errorf(dsec.Invalid, op, "", "%s", why) }
