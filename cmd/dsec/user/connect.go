package user

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/contexts"
)

const defaultSocket = "/run/dsec/gateway.sock"

// connect makes the client of a verb; Close is the caller's.
func connect(c *cobra.Command) (*client.Client, error) {
	name, _ := c.Flags().GetString("context") // empty where a test has no root
	cfg, err := endpoint(name, os.Getenv)
	if err != nil {
		return nil, err
	}
	return client.New(cfg)
}

// endpoint finds the gateway: the context that was named; DSEC_SOCKET or
// DSEC_URL; the context of DSEC_CONTEXT or the current one; the socket of this
// machine. DSEC_API_KEY goes over the key of a context.
func endpoint(name string, getenv func(string) string) (client.Config, error) {
	key := getenv("DSEC_API_KEY")
	if name == "" {
		if s := getenv("DSEC_SOCKET"); s != "" {
			return client.Config{URL: "unix://" + s, Key: key}, nil
		}
		if u := getenv("DSEC_URL"); u != "" {
			return client.Config{URL: u, Key: key}, nil
		}
	}
	f, err := contexts.Load(contexts.Path(getenv))
	if err != nil {
		return client.Config{}, err
	}
	if name == "" && getenv("DSEC_CONTEXT") == "" && f.Current == "" {
		if _, err := os.Stat(defaultSocket); err != nil {
			return client.Config{}, dsec.Errorf(dsec.Unavailable, "find gateway", "",
				"no context, no DSEC_URL and no %s; start one here with: sudo dsec up", defaultSocket)
		}
		return client.Config{URL: "unix://" + defaultSocket, Key: key}, nil
	}
	x, err := f.Pick(name, getenv)
	if err != nil {
		return client.Config{}, err
	}
	cfg := client.Config{URL: x.URL, Key: x.APIKey}
	if x.Socket != "" {
		cfg.URL = "unix://" + x.Socket
	}
	if key != "" {
		cfg.Key = key
	}
	return cfg, nil
}

// with runs fn with a client.
func with(c *cobra.Command, fn func(ctx context.Context, cl *client.Client) error) error {
	cl, err := connect(c)
	if err != nil {
		return err
	}
	defer cl.Close()
	return fn(c.Context(), cl)
}

// find resolves what a user calls a sandbox: its id, its name, or the start of
// its id, if only one has it.
func find(ctx context.Context, cl *client.Client, arg string) (dsec.SandboxID, error) {
	if id, _, err := dsec.ParseSandboxID(arg); err == nil {
		return id, nil
	}
	// Those that ended are many more, and are meant only if no other is.
	for _, ended := range []bool{false, true} {
		all, _, err := cl.List(ctx, client.ListOptions{All: ended})
		if err != nil {
			return "", err
		}
		if id, err := among(all, arg); err != nil || id != "" {
			return id, err
		}
	}
	return "", dsec.Errorf(dsec.NotFound, "find sandbox", dsec.Quote(arg), "no sandbox has this id or name")
}

// among finds it in a list; "" if it is not there.
func among(all []client.Sandbox, arg string) (dsec.SandboxID, error) {
	var byName, byID []client.Sandbox
	for _, sb := range all {
		if sb.Spec.Name == arg {
			byName = append(byName, sb)
		}
		if len(arg) >= 4 && strings.HasPrefix(string(sb.ID), arg) {
			byID = append(byID, sb)
		}
	}
	for _, found := range [][]client.Sandbox{live(byName), byName, byID} {
		if len(found) > 0 {
			return single(found, arg)
		}
	}
	return "", nil
}

func single(found []client.Sandbox, arg string) (dsec.SandboxID, error) {
	if len(found) > 1 {
		return "", dsec.Errorf(dsec.Invalid, "find sandbox", dsec.Quote(arg), "%d sandboxes match, among them %s and %s", len(found), found[0].ID, found[1].ID)
	}
	return found[0].ID, nil
}

func live(all []client.Sandbox) (out []client.Sandbox) {
	for _, sb := range all {
		if sb.State.Live() {
			out = append(out, sb)
		}
	}
	return out
}

const completeWithin = 2 * time.Second

// completeSandboxes offers the sandboxes of the project; most is how many
// arguments may be one, 0 any number.
func completeSandboxes(most int) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return sandboxNames(c, ""), cobra.ShellCompDirectiveNoFileComp
	}
}

// sandboxNames are ids, and names where there are, with a suffix.
func sandboxNames(c *cobra.Command, suffix string) []cobra.Completion {
	ctx, cancel := context.WithTimeout(context.Background(), completeWithin)
	defer cancel()
	cl, err := connect(c)
	if err != nil {
		return nil
	}
	defer cl.Close()
	all, _, err := cl.List(ctx, client.ListOptions{})
	if err != nil {
		return nil
	}
	var out []cobra.Completion
	for _, sb := range all {
		about := string(sb.State) + " " + string(sb.Spec.Image)
		out = append(out, cobra.CompletionWithDesc(string(sb.ID)+suffix, about))
		if sb.Spec.Name != "" {
			out = append(out, cobra.CompletionWithDesc(sb.Spec.Name+suffix, about))
		}
	}
	return out
}

// completeLayers offers tags.
func completeLayers(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(context.Background(), completeWithin)
	defer cancel()
	cl, err := connect(c)
	if err != nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	defer cl.Close()
	all, err := cl.Layers(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var out []cobra.Completion
	for _, l := range all {
		out = append(out, l.Tags...)
	}
	return out, cobra.ShellCompDirectiveDefault
}

// completeImage offers tags for the first argument.
func completeImage(c *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return completeLayers(c, args, word)
}
