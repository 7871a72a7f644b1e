package microvm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// plainVMM has no balloon in some machines.
type plainVMM struct {
	*qemu.Driver
	mu    sync.Mutex
	plain bool // the next
}

func (p *plainVMM) Start(ctx context.Context, s vmm.Shape, d vmm.Devices) (vmm.VM, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.Balloon = s.Balloon && !p.plain
	return p.Driver.Start(ctx, s, d)
}

func (p *plainVMM) next(plain bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.plain = plain
}

// burst is what a sandbox does between two pauses: it writes and reads files, and a program takes memory.
const burst = "rm -f /big; head -c 104857600 /dev/urandom >/big && cat /big /big >/dev/null && head -c 157286400 /dev/zero | tail >/dev/null"

const (
	bursts     = 4
	burstEvery = 45 * time.Second
)

// bursty is one machine of the measurement.
type bursty struct {
	name string
	id   dsec.SandboxID
	busy time.Duration // in bursts

	last     time.Time
	have     int64
	integral float64 // bytes · seconds
	most     int64
}

func (b *bursty) sample(have int64) {
	now := time.Now()
	if !b.last.IsZero() {
		b.integral += float64(b.have+have) / 2 * now.Sub(b.last).Seconds()
	}
	b.last, b.have, b.most = now, have, max(b.most, have)
}

// What a machine takes of the host over time that works for some seconds and waits for some more, with
// a balloon and without, and as a clone; all at the same time.
func TestNumbersOfBursts(t *testing.T) {
	w := benching(t)
	v := &plainVMM{Driver: w.driver}
	w.machinery = func(m *Machinery) { v.Driver = w.driver; m.VMM = v }
	w.reopen(t)
	large := func(r *runtime.Request) { r.Spec.Limits.Memory, r.Spec.Limits.Disk = 384*mib, 512*mib }
	v.next(true)
	all := []*bursty{{name: "cold, without", id: w.create(t, large, cold)}}
	v.next(false)
	all = append(all, &bursty{name: "cold, with", id: w.create(t, large, cold)}, &bursty{name: "clone", id: w.create(t, large)})

	begun := time.Now()
	var work sync.WaitGroup
	for _, b := range all {
		work.Go(func() {
			for n := range bursts {
				time.Sleep(time.Until(begun.Add(time.Duration(n) * burstEvery)))
				at := time.Now()
				if err := w.burst(t.Context(), b.id); err != nil {
					t.Errorf("%s: %v", b.name, err)
				}
				b.busy += time.Since(at)
			}
		})
	}
	w.watchBursts(t, all, begun.Add(bursts*burstEvery))
	work.Wait()
	for _, b := range all {
		t.Logf("%-14s mean %4.0f MiB, at most %4d MiB, %4d MiB at the end; %.1f %% below the first; a burst takes %v", b.name,
			b.integral/time.Since(begun).Seconds()/mib, b.most/mib, b.have/mib, 100*(1-b.integral/all[0].integral), (b.busy / bursts).Round(10*time.Millisecond))
	}
	if saved := 1 - all[1].integral/all[0].integral; saved < 0.21 {
		t.Errorf("%.1f %% below a machine without: 21 %% were asked for", 100*saved)
	}
}

// burst runs one, however long it takes a machine that has other things to do.
func (w *world) burst(ctx context.Context, id dsec.SandboxID) error {
	p, err := w.r.Exec(ctx, id, runtimetest.Shell(burst))
	if err != nil {
		return err
	}
	res, err := p.Wait(ctx)
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("a burst ended with %+v", res)
	}
	return errors.Join(err, p.Release(ctx))
}

func (w *world) watchBursts(t *testing.T, all []*bursty, until time.Time) {
	t.Helper()
	for time.Now().Before(until) {
		for _, b := range all {
			sb, ok := w.r.boxes.Get(b.id)
			if !ok {
				t.Fatalf("%s has ended", b.name)
			}
			sb.Mu.Lock()
			m := sb.machine
			sb.Mu.Unlock()
			have, err := m.Memory()
			must(t, err)
			b.sample(have)
		}
		time.Sleep(250 * time.Millisecond)
	}
}
