package nodeapi

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

const putWithin = 2 * time.Second

// registrar keeps this node's registration and heartbeats in the buckets.
type registrar struct {
	s       *Server
	js      jetstream.JetStream
	hb      jetstream.KeyValue
	nodes   jetstream.KeyValue
	reg     *dsecv1.Registration // nil until the epoch is ours
	checked time.Time            // when the registration was last seen in place
}

// How often a node makes sure that its registration still is there: a control
// plane whose disk was lost gets it back.
const recheck = 5 * time.Second

// beat registers and sends heartbeats until Close.
func (s *Server) beat() {
	js, err := jetstream.New(s.nc)
	if err != nil {
		s.log.Error("open jetstream", "err", err)
		return
	}
	r := &registrar{s: s, js: js}
	tick := time.NewTicker(s.cfg.Every)
	defer tick.Stop()
	quiet := false // said already that it does not work
	for {
		if err := r.once(); err == nil {
			quiet = false
		} else if !quiet && s.ctx.Err() == nil {
			quiet = true
			s.log.Warn("no heartbeat", "node", s.cfg.Node, "err", err)
		}
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (r *registrar) once() error {
	ctx, cancel := context.WithTimeout(r.s.ctx, putWithin)
	defer cancel()
	if !r.s.nc.IsConnected() {
		return errors.New("not connected to nats")
	}
	if err := r.buckets(ctx); err != nil {
		return err
	}
	if time.Since(r.checked) > recheck {
		if err := r.register(ctx); err != nil {
			return err
		}
		r.checked = time.Now()
	}
	l := r.s.cfg.Watcher.Load()
	h := &dsecv1.Heartbeat{Node: string(r.s.cfg.Node), Epoch: r.reg.Epoch, Live: int32(l.Live), Starting: int32(l.Starting),
		MaxLive: int32(l.MaxLive), Cpu: l.CPU, Memory: l.Memory, Disk: l.Disk, Draining: l.Draining, Time: wire.Stamp(time.Now())}
	for _, t := range l.Tiers {
		h.Tiers = append(h.Tiers, string(t))
	}
	b, err := proto.Marshal(h)
	if err != nil {
		return err
	}
	if _, err = r.hb.Put(ctx, string(r.s.cfg.Node), b); err != nil {
		r.hb = nil // the bucket may have been made anew
	}
	return err
}

func (r *registrar) buckets(ctx context.Context) error {
	if r.hb != nil && r.nodes != nil {
		return nil
	}
	var err error
	if r.hb, err = r.js.KeyValue(ctx, wire.BucketHeartbeats); err != nil {
		return err
	}
	r.nodes, err = r.js.KeyValue(ctx, wire.BucketNodes)
	return err
}

// register takes the next epoch, once, by compare-and-set, and puts the
// registration back if it is gone.
func (r *registrar) register(ctx context.Context) error {
	key := string(r.s.cfg.Node)
	old := &dsecv1.Registration{}
	e, err := r.nodes.Get(ctx, key)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
	case err != nil:
		return err
	default:
		if err := proto.Unmarshal(e.Value(), old); err != nil {
			return err
		}
	}
	if r.reg != nil && old.Epoch == r.reg.Epoch && old.Token == r.reg.Token {
		return nil
	}
	if r.reg != nil && old.Epoch > r.reg.Epoch {
		return dsec.Errorf(dsec.Conflict, "register node", key, "epoch %d was taken by another agent", old.Epoch)
	}
	reg := r.reg
	if reg == nil || old.Epoch == reg.Epoch {
		reg = &dsecv1.Registration{Node: key, Epoch: old.Epoch + 1, Address: r.s.cfg.Address, Token: r.s.token,
			Version: r.s.cfg.Version, Started: wire.Stamp(time.Now())}
	}
	b, err := proto.Marshal(reg)
	if err != nil {
		return err
	}
	if e == nil {
		_, err = r.nodes.Create(ctx, key, b)
	} else {
		_, err = r.nodes.Update(ctx, key, b, e.Revision())
	}
	if err == nil {
		r.reg = reg
		r.s.log.Info("registered", "node", key, "epoch", reg.Epoch)
	}
	return err
}
