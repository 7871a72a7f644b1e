package diskpool

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"time"
)

// sweepStale forgets quota groups without a subvolume.
func (p *btrfsPool) sweepStale() error {
	names, err := readNames(p.root)
	if err != nil {
		return err
	}
	live := map[uint64]bool{}
	for _, n := range names {
		if d, err := openDirAt(p.root, n); err == nil {
			if id, err := subvolumeID(d); err == nil {
				live[id] = true
			}
			_ = d.Close()
		}
	}
	entries, err := os.ReadDir(p.groups)
	if err != nil {
		return err
	}
	for _, e := range entries {
		id, err := strconv.ParseUint(strings.TrimPrefix(e.Name(), "0_"), 10, 64)
		if err == nil && strings.HasPrefix(e.Name(), "0_") && id >= rootObject && !live[id] {
			p.queue(id)
		}
	}
	return nil
}

// queue asks the sweeper to forget a quota group; when it is too busy, the
// next Open finds it.
func (p *btrfsPool) queue(id uint64) {
	select {
	case p.sweeping <- id:
		p.mu.Lock()
		p.pending++
		p.mu.Unlock()
	default:
	}
}

// sweep forgets quota groups when the kernel has dropped their subvolumes. The
// kernel does that after a commit, so it asks for one, which does not write
// anybody's data.
func (p *btrfsPool) sweep() {
	defer close(p.done)
	var waiting []uint64
	const rare, often = time.Hour, 200 * time.Millisecond
	timer := time.NewTimer(rare)
	defer timer.Stop()
	for {
		select {
		case id := <-p.sweeping:
			if waiting = append(waiting, id); len(waiting) == 1 {
				timer.Reset(often)
			}
			continue
		case <-p.stop:
			return
		case <-timer.C:
		}
		var left []uint64
		for _, id := range waiting {
			if exists, err := subvolumeExists(p.root, id); exists || err != nil {
				left = append(left, id)
				continue
			}
			_ = destroyGroup(p.root, id) // new kernels do it themselves
		}
		p.finished(len(waiting) - len(left))
		if waiting = left; len(waiting) > 0 {
			_ = startCommit(p.root) // the kernel's own one comes later
			timer.Reset(often)
		}
	}
}

func (p *btrfsPool) finished(n int) {
	if n == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pending -= n
	close(p.swept)
	p.swept = make(chan struct{})
}

// makeSubvolume waits for deletions under way before it says the pool is full.
func (p *btrfsPool) makeSubvolume(ctx context.Context, name string) error {
	for {
		p.mu.Lock()
		pending, swept := p.pending, p.swept
		p.mu.Unlock()
		err := createSubvolume(p.root, name)
		if !isFull(err) || pending == 0 {
			return err
		}
		select {
		case <-swept:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}
