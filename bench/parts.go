package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"
)

// Part is a contender whose cycle is one thing that a creation and its end have
// to do, alone: what the kernel asks for that thing on this machine.
func Part(name string, do func(ctx context.Context, worker, n int) error) Contender {
	return Contender{Name: name, Worker: func(index int) (Worker, error) { return part{index, do}, nil }}
}

type part struct {
	index int
	do    func(ctx context.Context, worker, n int) error
}

func (p part) Cycle(ctx context.Context, n int) (time.Duration, error) {
	begin := time.Now()
	err := p.do(ctx, p.index, n)
	return time.Since(begin), err
}

func (p part) Close() error { return nil }

// Process starts a program and waits for its end; with namespaces as a new
// process of all those that a sandbox has.
func Process(argv []string, namespaces bool) func(context.Context, int, int) error {
	return func(ctx context.Context, _, _ int) error {
		c := exec.CommandContext(ctx, argv[0], argv[1:]...)
		if namespaces {
			ids := []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
			c.SysProcAttr = &syscall.SysProcAttr{UidMappings: ids, GidMappings: ids,
				Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
					syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET | syscall.CLONE_NEWCGROUP}
		}
		return c.Run()
	}
}

// Sum says how many cycles a second the parts allow if each is done once in a
// cycle at the rate it has alone, and what of that the whole reaches. Rates are
// medians of the rounds at the highest concurrency.
func Sum(samples []Sample, whole string, parts []string) string {
	most := 0
	for _, s := range samples {
		most = max(most, s.Concurrency)
	}
	rate := func(name string) float64 {
		var all []float64
		for _, s := range samples {
			if s.Contender == name && s.Concurrency == most {
				all = append(all, s.Rate())
			}
		}
		slices.Sort(all)
		if len(all) == 0 {
			return 0
		}
		return all[len(all)/2]
	}
	var each float64
	for _, p := range parts {
		if r := rate(p); r > 0 {
			each += 1 / r
		}
	}
	if each == 0 {
		return ""
	}
	return fmt.Sprintf("at concurrency %d the parts alone allow %.0f cycles/s; %s reaches %.0f, %.2fx of that", most, 1/each, whole, rate(whole),
		rate(whole)*each)
}
