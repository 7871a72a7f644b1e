package hold

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
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

// launchDaemon starts a hold and waits until it listens.
func launchDaemon(ctx context.Context, o Options) error {
	cfg := daemonConfig{Socket: o.Socket, Forkers: o.Forkers}
	if o.Cgroup != "" {
		if err := os.Mkdir(o.Cgroup, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		cfg.Join = append(cfg.Join, filepath.Join(o.Cgroup, "cgroup.procs"))
	}
	for _, t := range o.Tasks {
		cfg.Join = append(cfg.Join, filepath.Join(filepath.Dir(t), "cgroup.procs"))
	}
	arg, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	log := os.DevNull
	if o.Log != "" {
		log = o.Log
	}
	out, err := os.OpenFile(log, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer func() { _ = null.Close() }()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	command, helper, done, err := o.command()
	if err != nil {
		_ = w.Close()
		return err
	}
	defer done()
	argv := append(append([]string{}, command...), roleStart, string(arg))
	p, err := os.StartProcess(command[0], argv, &os.ProcAttr{Dir: "/", Env: os.Environ(), Files: []*os.File{null, out, out, w, helper},
		Sys: &syscall.SysProcAttr{Setsid: true}})
	_ = w.Close()
	if err != nil {
		return err
	}
	st, err := p.Wait()
	if err != nil || !st.Success() {
		return fmt.Errorf("starter ended with %v: %w (see %s)", st, errors.Join(err), log)
	}
	return awaitReady(ctx, r)
}

func awaitReady(ctx context.Context, r *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(aLongTimeAgo) })
	defer stop()
	b := make([]byte, 1024)
	n, err := r.Read(b)
	switch {
	case string(b[:n]) == "ok":
		return nil
	case n > 0:
		return errors.New(string(b[:n]))
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("it ended while starting: %w", err)
}

// command is how to run dsec-hold, and the program its helpers run; done is
// called after the start.
func (o *Options) command() (argv []string, helper *os.File, done func(), err error) {
	if o.Binary == nil && len(o.Command) == 0 {
		return nil, nil, nil, dsec.Errorf(dsec.Invalid, "start hold", o.Socket, "no binary is given")
	}
	if helper = o.Binary; helper == nil {
		helper, err = os.Open(o.Command[0])
	} else {
		helper, err = duplicate(helper) // a number above those the child gets
	}
	if err != nil {
		return nil, nil, nil, err
	}
	done = func() { _ = helper.Close() }
	if len(o.Command) > 0 {
		return o.Command, helper, done, nil
	}
	return []string{fmt.Sprintf("/proc/self/fd/%d", fdOf(helper))}, helper, done, nil
}
