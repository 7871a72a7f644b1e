package user

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Phase is the verb that shows and changes the phase of a sandbox.
func Phase() *cobra.Command {
	return &cobra.Command{
		Use:   "phase SANDBOX [NAME]",
		Short: "Show the phase of a sandbox, or move it to another",
		Long: `Moves a sandbox that was made with --phases to another of its phases. Everything that runs in it
is killed; then the files, the network and the limits of the phase hold, and commands have its
rights. It goes forwards only, unless the phase lists others under "back".

Phases are a JSON list in a file:

  [{"name": "setup"},
   {"name": "code", "user": "agent", "users": ["agent"], "read_only": ["/repo/.git"], "network": {"mode": "none"}},
   {"name": "test", "reveal": ["/repo/tests"], "read_only": ["/repo/tests"]}]

Fields: name, network {mode, allow}, users, user, drop_capabilities, no_new_privs, writable,
executables, hide, reveal, read_only, end_services, limits {cpu, memory, pids}, back.

What "dsec exec -d --service" starts in the first phase goes on in later ones, until one with
end_services.`,
		Example:           "  dsec create debian:12 --name work --phases phases.json\n  dsec phase work\n  dsec phase work test",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				var sb client.Sandbox
				if len(args) == 1 {
					sb, err = cl.Get(ctx, id)
				} else {
					sb, err = cl.SetPhase(ctx, id, args[1])
				}
				if err != nil {
					return err
				}
				if sb.Phase == nil {
					return dsec.Errorf(dsec.IllegalState, "show phase of sandbox", string(id), "it was made without phases")
				}
				return show(c, sb.Phase, func(w io.Writer) error { return describePhase(w, sb) })
			})
		},
	}
}

func describePhase(w io.Writer, sb client.Sandbox) error {
	p := sb.Phase
	if _, err := fmt.Fprintf(w, "%s, generation %d\n", p.Name, p.Generation); err != nil {
		return err
	}
	if p.Moving != "" {
		_, err := fmt.Fprintf(w, "on its way to %s: nothing runs until it is there\n", p.Moving)
		return err
	}
	for _, next := range sb.Spec.Phases {
		if next.Name == p.Name || sb.Spec.MayMove(string(sb.ID), p.Name, next.Name) != nil {
			continue
		}
		if _, err := fmt.Fprintf(w, "  may go to %s\n", next.Name); err != nil {
			return err
		}
	}
	return nil
}

// readPhases reads the file of --phases; "" is none.
func readPhases(file string) (all []dsec.Phase, err error) {
	if file == "" {
		return nil, nil
	}
	in := io.Reader(os.Stdin)
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, dsec.E(dsec.Invalid, "read phases", file, err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, dsec.MaxSpecBytes+1))
	if err == nil && len(b) > dsec.MaxSpecBytes {
		err = fmt.Errorf("more than %d bytes", dsec.MaxSpecBytes)
	}
	if err == nil {
		all, err = parsePhases(b)
	}
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "read phases", file, err)
	}
	return all, nil
}

// parsePhases takes no field it does not know: a misspelt right would be none.
func parsePhases(b []byte) (all []dsec.Phase, err error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&all); err != nil {
		return nil, err
	}
	if d.More() {
		return nil, fmt.Errorf("something follows the list")
	}
	return all, nil
}
