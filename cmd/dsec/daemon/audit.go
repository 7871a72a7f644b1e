package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/audit/proc"
	"github.com/opendsec/dsec/audit/watch"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/procinfo"
)

// evidence is what sees what sandboxes do, and keeps it.
type evidence struct {
	store *audit.Store // nil: node.audit is off
	proc  *proc.Witness
	watch *watch.Witness

	records *prometheus.CounterVec // by kind
	lost    prometheus.Counter
}

// open is done before sandboxes of an earlier agent are found, start after that.
func (e *evidence) open(ctx context.Context, s *settings, m *machine, log *slog.Logger) (err error) {
	if !s.Node.Audit { // it may have been on: then the kernel would go on with it, for nobody
		return errors.Join(proc.Forget(ctx, proc.Config{Keeper: m.hold, Name: s.Instance, Base: s.Node.UIDBase}), watch.Forget(ctx, watch.Config{Keeper: m.hold, Name: s.Instance}))
	}
	e.records = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_audit_records_total", Help: "Records of evidence by kind."}, []string{"kind"})
	e.lost = prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_audit_lost_total", Help: "Records of evidence that are known to be missing, at least."})
	e.store, err = audit.Open(audit.Config{Dir: s.auditDir(), Log: log, Count: func(r dsec.AuditRecord) {
		e.records.WithLabelValues(string(r.Kind)).Inc()
		if r.Kind == dsec.AuditLost {
			e.lost.Add(float64(max(1, r.Count)))
		}
	}})
	if err != nil {
		return err
	}
	if err := e.witnesses(ctx, witnessed{m.hold, s.Instance, s.Node.UIDBase, m.disks}, log); err != nil {
		log.Warn("not all that sandboxes do is seen", "err", err)
	}
	return nil
}

// witnessed is where witnesses look, and who keeps what they have in the kernel.
type witnessed struct {
	keeper  audit.Keeper
	name    string
	uidBase uint32
	disks   diskpool.Pool
}

// witnesses opens those that the machine can have; the error says which it cannot.
func (e *evidence) witnesses(ctx context.Context, at witnessed, log *slog.Logger) error {
	cache := &procinfo.Cache{}
	var unseen, unwatched error
	e.proc, unseen = proc.Open(ctx, proc.Config{Keeper: at.keeper, Name: at.name, Base: at.uidBase, Take: e.store.Append, Cache: cache, Log: log})
	if unseen != nil {
		e.proc = nil
	}
	var pool *os.File
	if p, ok := at.disks.(diskpool.Shared); ok {
		pool = p.Root()
	}
	e.watch, unwatched = watch.Open(ctx, watch.Config{Keeper: at.keeper, Name: at.name, Pool: pool, Take: e.store.Append, Cache: cache, Log: log})
	if unwatched != nil {
		e.watch = nil
	}
	return errors.Join(unseen, unwatched)
}

// witness is for the runtime; nil: nobody sees anything.
func (e *evidence) witness() audit.Witness {
	var all audit.Witnesses
	if e.proc != nil {
		all = append(all, e.proc)
	}
	if e.watch != nil {
		all = append(all, e.watch)
	}
	if e.store == nil {
		return nil
	}
	return append(all, &ender{e.store})
}

// ender writes what the store holds back when a sandbox has ended. It is asked last.
type ender struct{ store *audit.Store }

func (e *ender) Add(context.Context, audit.Subject, bool) error { return nil }

func (e *ender) Remove(_ context.Context, id dsec.SandboxID, _ *os.File) { e.store.End(id) }

func (e *evidence) unseen(id dsec.SandboxID, err error) {
	if e.store != nil {
		e.store.Append(id, audit.Lost(0, "not everything of the sandbox is seen: "+err.Error()))
	}
}

func (e *evidence) start() lifecycle.Step {
	return lifecycle.Step{Name: "witness", Do: func(context.Context) error {
		if e.watch != nil {
			e.watch.Start()
		}
		if e.proc != nil {
			return e.proc.Start()
		}
		return nil
	}}
}

func (e *evidence) close() error {
	var errs []error
	if e.proc != nil {
		errs = append(errs, e.proc.Close())
	}
	if e.watch != nil {
		errs = append(errs, e.watch.Close())
	}
	if e.store != nil {
		errs = append(errs, e.store.Close())
	}
	return errors.Join(errs...)
}

func (e *evidence) register(r prometheus.Registerer) error {
	if e.store == nil {
		return nil
	}
	return errors.Join(r.Register(e.records), r.Register(e.lost))
}
