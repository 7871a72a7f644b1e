package user

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// mostAtOnce is how many sandboxes a verb with many works on at a time.
const mostAtOnce = 16

// forEach finds each sandbox and calls fn, many at a time; what fails does not
// keep the others. fn's value is printed, in the order of args.
func forEach(c *cobra.Command, args []string, fn func(context.Context, *client.Client, dsec.SandboxID) (any, error)) error {
	return with(c, func(ctx context.Context, cl *client.Client) error {
		values, errs := make([]any, len(args)), make([]error, len(args))
		slots := make(chan struct{}, mostAtOnce)
		var wg sync.WaitGroup
		for i, arg := range args {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				id, err := find(ctx, cl, arg)
				if err == nil {
					values[i], err = fn(ctx, cl, id)
				}
				errs[i] = err
			})
		}
		wg.Wait()
		for i, v := range values {
			if errs[i] != nil {
				continue
			}
			err := show(c, v, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, args[i])
				return err
			})
			if err != nil {
				return err
			}
		}
		return errors.Join(errs...)
	})
}
