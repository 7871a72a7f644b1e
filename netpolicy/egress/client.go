package egress

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/netpolicy"
)

// answers is how long a server may take, its start included.
const answers = 5 * time.Second

// Agent is the configuration of a Client.
type Agent struct {
	Socket string         // where servers listen
	Router *os.File       // network namespace; duplicated
	Listen netip.AddrPort // where the router sends connections to
	Conns  int            // of one sandbox at once
	Log    *slog.Logger
	// Refused is called with refusals, one at a time; nil: nobody wants to know.
	Refused func(Refusal)
}

// Client tells servers what sandboxes may reach: the one that is there, and each
// that comes after it. Its methods may be called at one time.
type Client struct {
	c      Agent
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu    sync.Mutex // of what follows, and of the conversation
	conn  *net.UnixConn
	table table     // what every server is to have
	taken bool      // what the first server knew is in it
	late  time.Time // when none was found in time
}

// again is how long after that none is looked for: who asks is not kept waiting
// behind all the others.
const again = time.Second

var _ netpolicy.Egress = (*Client)(nil)

// Open begins a conversation and takes over what is in force. Without a server it
// goes on trying.
func Open(ctx context.Context, c Agent) (*Client, error) {
	var err error
	if c.Router, err = linux.Duplicate(c.Router); err != nil {
		return nil, err
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	x := &Client{c: c, table: table{}}
	x.ctx, x.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if _, err := x.ask(ctx, request{Op: opAddresses}); err != nil {
		c.Log.Warn("nobody looks at names: sandboxes reach none on ports 80 and 443", "err", err)
	}
	x.work.Go(x.watch)
	return x, nil
}

// Close lets go. The server goes on.
func (x *Client) Close() error {
	x.cancel()
	x.mu.Lock()
	x.dropLocked()
	x.mu.Unlock()
	x.work.Wait()
	return x.c.Router.Close()
}

// Set implements netpolicy.Egress.
func (x *Client) Set(ctx context.Context, a netpolicy.Admitted) error {
	if err := valid(a); err != nil {
		return err
	}
	return x.do(ctx, request{Op: opSet, Admitted: &a}, func() error {
		x.table[a.Address] = &a
		return nil
	})
}

// Pin implements netpolicy.Egress.
func (x *Client) Pin(ctx context.Context, sandbox netip.Addr, name string, addrs []netip.Addr) error {
	return x.do(ctx, request{Op: opPin, Sandbox: sandbox, Name: name, Addresses: addrs}, func() error {
		return x.table.pin(sandbox, name, addrs)
	})
}

// Forget implements netpolicy.Egress.
func (x *Client) Forget(sandbox netip.Addr, id dsec.SandboxID) {
	if known, ok := x.Known(sandbox); !ok || known.Sandbox != id {
		return
	}
	ctx, cancel := context.WithTimeout(x.ctx, answers)
	defer cancel()
	if err := x.do(ctx, request{Op: opForget, Sandbox: sandbox, ID: id}, func() error {
		if known := x.table[sandbox]; known != nil && known.Sandbox == id {
			delete(x.table, sandbox)
		}
		return nil
	}); err != nil {
		x.c.Log.Warn("sandbox not forgotten", "address", sandbox, "err", err) // by the next server it is
	}
}

// Known implements netpolicy.Egress.
func (x *Client) Known(sandbox netip.Addr) (netpolicy.Admitted, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if a := x.table[sandbox]; a != nil {
		return *a, true
	}
	return netpolicy.Admitted{}, false
}

// Addresses implements netpolicy.Egress.
func (x *Client) Addresses() []netip.Addr {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Collect(maps.Keys(x.table))
}

// Rows implements netpolicy.Egress.
func (x *Client) Rows(ctx context.Context, sandbox netip.Addr) ([]dsec.EgressRow, error) {
	r, err := x.ask(ctx, request{Op: opAudit, Sandbox: sandbox})
	return r.Rows, err
}

// do changes what every server is to have, then tells the one that is there.
func (x *Client) do(ctx context.Context, q request, change func() error) error {
	x.mu.Lock()
	var lost error
	if !x.taken { // what is in force is to be known before it changes
		lost = x.connectLocked(ctx)
	}
	err := change()
	x.mu.Unlock()
	if err = cmp.Or(err, lost); err != nil {
		return err
	}
	_, err = x.ask(ctx, q)
	return err
}

// ask is answered by the server that is there, or that comes soon.
func (x *Client) ask(ctx context.Context, q request) (reply, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, answers)
	defer cancel()
	for {
		err := x.connectLocked(ctx)
		if err != nil {
			return reply{}, err
		}
		r, err := x.exchangeLocked(ctx, q)
		if err == nil {
			return r, r.err()
		}
		x.dropLocked()
		if ctx.Err() != nil {
			return reply{}, dsec.E(dsec.Unavailable, "ask egress", q.Op, err)
		}
	}
}

func (x *Client) exchangeLocked(ctx context.Context, q request) (r reply, err error) {
	end, _ := ctx.Deadline()
	if err = x.conn.SetDeadline(end); err == nil {
		err = write(x.conn, q)
	}
	if err == nil {
		err = read(x.conn, &r)
	}
	return r, err
}

func (x *Client) dropLocked() {
	if x.conn != nil {
		_ = x.conn.Close()
		x.conn = nil
	}
}

// connectLocked finds a server, and has it know what it is to.
func (x *Client) connectLocked(ctx context.Context) error {
	if x.conn != nil {
		return nil
	}
	if time.Since(x.late) < again {
		return dsec.Errorf(dsec.Unavailable, "find egress", x.c.Socket, "there was none a moment ago")
	}
	ctx, cancel := context.WithTimeout(ctx, answers)
	defer cancel()
	for {
		c, err := x.greet(ctx)
		if err == nil {
			x.conn = c
			if err = x.agreeLocked(ctx); err == nil {
				return nil
			}
			x.dropLocked()
		}
		if within.Sleep(ctx, 20*time.Millisecond) != nil {
			x.late = time.Now()
			return dsec.E(dsec.Unavailable, "find egress", x.c.Socket, err)
		}
	}
}

// greet connects to a server, whatever it knows.
func (x *Client) greet(ctx context.Context) (*net.UnixConn, error) {
	var d net.Dialer
	dialled, err := d.DialContext(ctx, "unix", x.c.Socket)
	if err != nil {
		return nil, err
	}
	c := dialled.(*net.UnixConn)
	end, _ := ctx.Deadline()
	err = c.SetDeadline(end)
	if err == nil {
		_, _, err = c.WriteMsgUnix([]byte{0}, unix.UnixRights(int(x.c.Router.Fd())), nil)
	}
	if err == nil {
		err = write(c, request{Op: opGreet, Version: Version, Listen: x.c.Listen, Conns: x.c.Conns})
	}
	var r reply
	if err == nil {
		err = read(c, &r)
	}
	if err == nil {
		err = r.err()
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// agreeLocked has the server know what this client does; at first it is the other
// way round.
func (x *Client) agreeLocked(ctx context.Context) error {
	r, err := x.exchangeLocked(ctx, request{Op: opAddresses})
	if err != nil {
		return err
	}
	if !x.taken {
		for _, a := range r.Addresses {
			got, err := x.exchangeLocked(ctx, request{Op: opGet, Sandbox: a})
			if err != nil {
				return err
			}
			if got.Admitted != nil {
				x.takeLocked(*got.Admitted)
			}
		}
		x.taken = true
	}
	for _, a := range r.Addresses {
		if x.table[a] == nil {
			if _, err := x.exchangeLocked(ctx, request{Op: opForget, Sandbox: a}); err != nil {
				return err
			}
		}
	}
	for _, a := range x.table {
		if _, err := x.exchangeLocked(ctx, request{Op: opSet, Admitted: a}); err != nil {
			return err
		}
	}
	return nil
}

// takeLocked takes over what was handed out before; the rules of one that was told
// already are newer.
func (x *Client) takeLocked(a netpolicy.Admitted) {
	if told := x.table[a.Address]; told != nil {
		if told.Sandbox != a.Sandbox {
			return
		}
		rules := *told
		rules.Pins = a.Pins
		a = rules
	}
	x.table[a.Address] = &a
}

// watch takes refusals. When a server has gone, the next one is told everything.
func (x *Client) watch() {
	for x.ctx.Err() == nil {
		if err := x.watchOne(); x.ctx.Err() == nil && !errors.Is(err, io.EOF) {
			x.c.Log.Warn("refusals of egress not read", "err", err)
		}
		_ = within.Sleep(x.ctx, 100*time.Millisecond)
	}
}

func (x *Client) watchOne() error {
	ctx, cancel := context.WithTimeout(x.ctx, answers)
	defer cancel()
	c, err := x.greet(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(x.ctx, func() { _ = c.Close() })
	defer stop()
	if err := c.SetDeadline(time.Time{}); err != nil {
		return err
	}
	if err := write(c, request{Op: opWatch}); err != nil {
		return err
	}
	x.ready(ctx)
	for {
		var r reply
		if err := read(c, &r); err != nil {
			return err
		}
		if r.Refusal != nil && x.c.Refused != nil {
			x.c.Refused(*r.Refusal)
		}
	}
}

// ready has a server that has just come know what it is to.
func (x *Client) ready(ctx context.Context) {
	x.mu.Lock()
	x.late = time.Time{}
	x.mu.Unlock()
	if _, err := x.ask(ctx, request{Op: opAddresses}); err != nil && x.ctx.Err() == nil {
		x.c.Log.Warn("egress was told nothing", "err", err)
	}
}
