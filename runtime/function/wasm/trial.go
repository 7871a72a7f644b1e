package wasm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
)

// The time that the compiler takes can grow with the square of a function's jumps, and nothing
// interrupts it. So a module that is new is compiled in a process of its own first, where it
// costs nobody else's calls if that has to be ended.

const (
	trialGroup  = group + ".try"
	trialMemory = 1 << 30
	trialWithin = 30 * time.Second
	keptGood    = 4096 // modules
)

// tried has a module tried, once for all calls that have it. An answer is what the calls get that
// cannot have it compiled.
func (h *Host) tried(ctx context.Context, r *request, module []byte, within time.Duration) (*answer, error) {
	k := which{r.digest, r.fuel > 0}
	for {
		h.mu.Lock()
		other := h.trying[k]
		good := h.good[k]
		if !good && other == nil {
			h.trying[k] = make(chan struct{})
		}
		h.mu.Unlock()
		switch {
		case good:
			return nil, nil
		case other == nil:
			a, err := h.try(ctx, r, module, min(within, trialWithin))
			h.mu.Lock()
			if err == nil && a == nil {
				if len(h.good) >= keptGood {
					clear(h.good)
				}
				h.good[k] = true
			}
			close(h.trying[k])
			delete(h.trying, k)
			h.mu.Unlock()
			return a, err
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, dsec.E(dsec.ClassOf(ctx.Err()), "wait for a module to be compiled", "", context.Cause(ctx))
		}
	}
}

// try compiles a module in a process that it ends.
func (h *Host) try(ctx context.Context, r *request, module []byte, within time.Duration) (_ *answer, err error) {
	const op = "try module"
	select {
	case h.trial <- struct{}{}:
		defer func() { <-h.trial }()
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, "", context.Cause(ctx))
	}
	memory := min(trialMemory, h.o.room())
	if err := h.memory.Acquire(ctx, memory); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, "", context.Cause(ctx))
	}
	defer h.memory.Release(memory)
	h.mu.Lock()
	p, err := h.start(trialGroup, memory)
	h.mu.Unlock()
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, op, "", err)
	}
	defer func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
		err = errors.Join(err, h.removeGroup(trialGroup))
	}()
	select {
	case <-p.ready:
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, "", context.Cause(ctx))
	}
	limited, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	q := request{try: true, digest: r.digest, fuel: r.fuel}
	a, err := p.ask(limited, &q, module)
	no := func(format string, args ...any) (*answer, error) {
		return &answer{says: saysResult, end: endModule, detail: fmt.Sprintf(format, args...)}, nil
	}
	switch {
	case err == nil && a.says == saysResult && a.end == endExit:
		return nil, nil
	case err == nil && a.says == saysResult:
		return a, nil
	case ctx.Err() == nil && limited.Err() != nil:
		return no("compiling it took longer than limits.compile, and than %v at most", trialWithin)
	case err != nil && p.over() && p.outOfMemory():
		return no("compiling it takes more than %d MiB of memory", memory>>20)
	case err != nil && p.over() && p.cmd.ProcessState.ExitCode() > 0: // it ended itself, and was not killed
		return no("the compiler does not survive it: exit code %d", p.cmd.ProcessState.ExitCode())
	case err == nil:
		err = dsec.Errorf(dsec.Internal, op, "", "the worker does not take it")
	}
	return nil, err
}

// outOfMemory reports whether the kernel ended a worker for its memory.
func (p *process) outOfMemory() bool {
	if p.group == nil {
		return false
	}
	n, err := p.group.OOMKills()
	return err == nil && n > 0
}
