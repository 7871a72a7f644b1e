package gc

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// run says in the store that a collector is at work, and what it removes: in
// marks whose content never changes, so that a write that was given up and is
// carried out later does no harm.
type run struct {
	blobs blob.Store
	owner string
	stop  func() // ends the renewing

	mu    sync.Mutex // held while marks are written
	marks []mark
	wrote time.Time // when the last writing of them that worked began
}

type mark struct {
	key     string
	removes []string
}

// begin makes this the one run there is.
func (p *pass) begin(ctx context.Context) error {
	r := &run{blobs: p.blobs, owner: p.o.Owner}
	if err := r.write(ctx, nil); err != nil {
		return err
	}
	info, err := p.blobs.Stat(ctx, r.marks[0].key)
	if err == nil {
		p.run, p.now = r, info.ModTime
		err = p.alone(ctx)
	}
	if err != nil {
		return errors.Join(err, r.end(ctx))
	}
	r.renew(ctx)
	return nil
}

// renew writes the run again and again until it ends.
func (r *run) renew(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	r.stop = func() { cancel(); <-done }
	go func() {
		defer close(done)
		t := time.NewTicker(layer.RunEvery)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			_ = r.again(ctx) // if it goes on failing, alive says so
		}
	}()
}

// alone says whether another run is alive. Dead ones are removed.
func (p *pass) alone(ctx context.Context) error {
	for info, err := range p.blobs.List(ctx, layer.RunPrefix) {
		if err != nil {
			return err
		}
		if info.Key == p.run.marks[0].key {
			continue
		}
		age := p.now.Sub(info.ModTime)
		if age > layer.RunDead {
			if err := p.blobs.Delete(ctx, info.Key); err != nil {
				return err
			}
			continue
		}
		owner := "somebody"
		if b, err := blob.ReadAll(ctx, p.blobs, info.Key, layer.MaxRun); err == nil {
			if other, err := layer.DecodeRun(b, info.Key); err == nil {
				owner = dsec.Quote(other.Owner)
			}
		}
		return dsec.Errorf(dsec.Unavailable, "begin collection", info.Key, "%s is at work, and said so %v ago; if it was killed, its run ends %v after that", owner, age.Round(time.Second), layer.RunDead)
	}
	return nil
}

// write makes a mark that says what the run removes.
func (r *run) write(ctx context.Context, removes []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.marks = append(r.marks, mark{layer.RunPrefix + dsec.Random(20), removes})
	return r.writeLocked(ctx, r.marks[len(r.marks)-1:])
}

// again writes all marks as they are.
func (r *run) again(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.writeLocked(ctx, r.marks)
}

func (r *run) writeLocked(ctx context.Context, marks []mark) error {
	if err := r.stoodStillLocked(); err != nil {
		return err
	}
	began := time.Now()
	for _, m := range marks {
		if err := r.blobs.Put(ctx, m.key, bytes.NewReader(layer.NewRun(r.owner, m.removes).Encode()), blob.PutOptions{}); err != nil {
			return err
		}
	}
	if r.wrote.IsZero() || len(marks) == len(r.marks) {
		r.wrote = began
	}
	return nil
}

// stoodStillLocked is an error when others may soon take the run for dead. Then
// it must not come to life again.
func (r *run) stoodStillLocked() error {
	if age := time.Since(r.wrote); !r.wrote.IsZero() && age > layer.RunStops {
		return dsec.Errorf(dsec.Unavailable, "collect garbage", r.marks[0].key, "stood still for %v: another may be at work", age.Round(time.Second))
	}
	return nil
}

// alive gives a context in which something may be deleted: it ends before
// anybody takes the run for dead.
func (r *run) alive(ctx context.Context) (context.Context, context.CancelFunc, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.stoodStillLocked(); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithDeadline(ctx, r.wrote.Add(layer.RunStops))
	return ctx, cancel, nil
}

func (r *run) end(ctx context.Context) error {
	if r.stop != nil {
		r.stop()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var err error
	for _, m := range r.marks {
		err = errors.Join(err, r.blobs.Delete(ctx, m.key))
	}
	return err
}

func (p *pass) end(ctx context.Context) error { return p.run.end(ctx) }
