package hold

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/opendsec/dsec"
)

// Ensure connects to the hold behind o.Socket, and starts one if none runs: a
// session of its own, in its own cgroup, nobody's child. One that runs another
// program than o.Binary becomes that program, and no sandbox notices; if it
// cannot, it goes on as it is and Info says why.
func Ensure(ctx context.Context, o Options) (*Client, error) {
	if o.Start == 0 {
		o.Start = 10 * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, o.Start)
	defer cancel()
	c, err := dial(ctx, o.Socket)
	if err == nil {
		c, err = o.upgraded(ctx, c)
	}
	if err == nil {
		c.info.Adopted = true
		return c, nil
	}
	if dsec.ClassOf(err) != dsec.Unavailable {
		return nil, err
	}
	if err := launchDaemon(ctx, o); err != nil {
		if _, ok := errors.AsType[*dsec.Error](err); ok {
			return nil, err
		}
		return nil, dsec.E(dsec.Unavailable, "start hold", o.Socket, err)
	}
	return Dial(ctx, o.Socket)
}

// upgraded returns the client of the hold that c is of, once it runs o.Binary.
func (o *Options) upgraded(ctx context.Context, c *Client) (*Client, error) {
	if o.Binary == nil {
		return c.speaking(o.Socket)
	}
	want, err := digestOf(o.Binary)
	if err != nil {
		_ = c.Close()
		return nil, dsec.E(dsec.Internal, "read binary of hold", o.Binary.Name(), err)
	}
	if c.info.Digest == want {
		return c.speaking(o.Socket)
	}
	if err := c.upgrade(ctx, o.Binary); err != nil {
		c.info.Stale = err
		return c.speaking(o.Socket)
	}
	_ = c.Close()
	if c, err = Dial(ctx, o.Socket); err != nil {
		return nil, err
	}
	c.info.Upgraded = c.info.Digest == want
	return c, nil
}

// upgrade returns nil when the hold became another program: it hangs up then.
func (c *Client) upgrade(ctx context.Context, binary *os.File) error {
	f, ok, err := c.request(ctx, opUpgrade, nil, []*os.File{binary}, nil)
	if err != nil || !ok {
		return err
	}
	files, err := finish(f, ok, nil)
	closeAll(files)
	return err
}

// speaking closes a client that does not understand its hold.
func (c *Client) speaking(socket string) (*Client, error) {
	if c.info.Protocol == protocolVersion {
		return c, nil
	}
	_ = c.Close()
	err := fmt.Errorf("it speaks version %d, this program %d", c.info.Protocol, protocolVersion)
	if c.info.Stale != nil {
		err = fmt.Errorf("%w, and cannot be upgraded: %w", err, c.info.Stale)
	}
	return nil, dsec.E(dsec.Unsupported, "greet hold", socket, err)
}

// Dial connects to a running hold. No hold is Unavailable. Another live client
// is Conflict; one that has just died is waited for until ctx ends, at most 2 s.
func Dial(ctx context.Context, socket string) (*Client, error) {
	c, err := dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	return c.speaking(socket)
}

// dial is Dial of a hold that may speak another version.
func dial(ctx context.Context, socket string) (*Client, error) {
	limit := time.Now().Add(2 * time.Second)
	var taken error
	for {
		c, err := dialOnce(ctx, socket)
		if err != nil && ctx.Err() != nil && taken != nil {
			return nil, taken
		}
		taken = err
		if err == nil || dsec.ClassOf(err) != dsec.Conflict || time.Now().After(limit) {
			return c, err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}
