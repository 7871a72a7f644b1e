package user

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// forwarded is what port-forward prints as JSON for each port.
type forwarded struct {
	Address string `json:"address"` // here
	Port    uint16 `json:"port"`    // inside
}

// PortForward is the verb that makes ports of a sandbox reachable here.
func PortForward() *cobra.Command {
	var bind string
	c := &cobra.Command{
		Use:               "port-forward SANDBOX [LOCAL:]PORT...",
		Short:             "Listen here for ports of a sandbox, also with network none",
		Example:           "  dsec port-forward work 8000\n  dsec port-forward work 8080:80 5432",
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				return forward(ctx, c, cl, id, bind, args[1:])
			})
		},
	}
	c.Flags().StringVar(&bind, "address", "127.0.0.1", "address to listen on")
	return c
}

// ports reads [LOCAL:]PORT; LOCAL 0 is any free one.
func ports(arg string) (local, inside uint16, err error) {
	l, p, ok := strings.Cut(arg, ":")
	if !ok {
		p = l
	}
	in, err1 := strconv.ParseUint(p, 10, 16)
	out, err2 := strconv.ParseUint(l, 10, 16)
	if err1 != nil || err2 != nil || in == 0 {
		return 0, 0, dsec.Errorf(dsec.Invalid, "forward port", dsec.Quote(arg), "want PORT or LOCAL:PORT")
	}
	return uint16(out), uint16(in), nil
}

// forward serves until ctx ends.
func forward(ctx context.Context, c *cobra.Command, cl *client.Client, id dsec.SandboxID, bind string, args []string) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, arg := range args {
		local, inside, err := ports(arg)
		if err != nil {
			return err
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(bind, strconv.Itoa(int(local))))
		if err != nil {
			return dsec.E(dsec.Unavailable, "listen for port", arg, errors.Unwrap(err))
		}
		wg.Go(func() {
			<-ctx.Done()
			_ = l.Close()
		})
		wg.Go(func() { accept(ctx, c.ErrOrStderr(), cl, id, inside, l) })
		err = show(c, forwarded{l.Addr().String(), inside}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s → port %d of %s\n", l.Addr(), inside, id)
			return err
		})
		if err != nil {
			return err
		}
	}
	<-ctx.Done()
	return nil // ended as it should: by its user
}

func accept(ctx context.Context, stderr io.Writer, cl *client.Client, id dsec.SandboxID, port uint16, l net.Listener) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		near, err := l.Accept()
		if err != nil {
			return
		}
		wg.Go(func() {
			defer near.Close()
			far, err := cl.Dial(ctx, id, port)
			if err != nil {
				fmt.Fprintln(stderr, "dsec:", ErrorText(err))
				return
			}
			defer far.Close()
			stop := context.AfterFunc(ctx, func() {
				_ = near.Close()
				_ = far.Close()
			})
			defer stop()
			join(near, far)
		})
	}
}

// join copies both ways and hands each end of file on.
func join(a, b net.Conn) {
	var wg sync.WaitGroup
	one := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // a broken connection is closed, which is all there is to say
		if w, ok := to.(interface{ CloseWrite() error }); ok {
			_ = w.CloseWrite()
		} else {
			_ = to.Close()
		}
	}
	wg.Go(func() { one(a, b) })
	wg.Go(func() { one(b, a) })
	wg.Wait()
}
