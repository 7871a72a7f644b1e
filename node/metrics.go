package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
)

// Metrics counts what the node does, never with a label of one sandbox.
type Metrics struct {
	creations *prometheus.CounterVec   // outcome: ok or an error class
	retries   prometheus.Counter       // of creations, inside
	steps     *prometheus.HistogramVec // of creations
	ends      *prometheus.CounterVec   // cause
	live      *prometheus.GaugeVec     // state
	execs     *prometheus.CounterVec   // status
	commits   prometheus.Histogram
	batch     prometheus.Histogram
	lost      prometheus.Counter // event subscribers that were too slow

	unreadable prometheus.Counter // records
}

// NewMetrics makes the counters.
func NewMetrics() *Metrics {
	buckets := prometheus.ExponentialBuckets(0.0001, 2, 20)
	return &Metrics{
		creations: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_node_creations_total", Help: "Creations by outcome."}, []string{"outcome"}),
		retries:   prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_node_creation_retries_total", Help: "Creations tried a second time inside the node."}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dsec_node_creation_step_seconds", Help: "Time of each step of a creation.",
			Buckets: buckets}, []string{"step"}),
		ends:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_node_ends_total", Help: "Ended sandboxes by cause."}, []string{"cause"}),
		live:    prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "dsec_node_sandboxes", Help: "Sandboxes by state."}, []string{"state"}),
		execs:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_node_execs_total", Help: "Ended commands by status."}, []string{"status"}),
		commits: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_node_ledger_commit_seconds", Help: "Time of a ledger commit.", Buckets: buckets}),
		batch: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_node_ledger_batch", Help: "Changes in one ledger commit.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 9)}),
		lost: prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_node_slow_subscribers_total", Help: "Event streams that were cut because they did not keep up."}),
		unreadable: prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_node_records_unreadable_total",
			Help: "Records of the ledger that were passed over because they cannot be read."}),
	}
}

// Register makes them visible.
func (m *Metrics) Register(r prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{m.creations, m.retries, m.steps, m.ends, m.live, m.execs, m.commits, m.batch, m.lost, m.unreadable} {
		if err := r.Register(c); err != nil {
			return dsec.E(dsec.Internal, "register metrics", "node", err)
		}
	}
	return nil
}

func (m *Metrics) created(err error, steps []dsec.Step) {
	outcome := "ok"
	if err != nil {
		outcome = string(dsec.ClassOf(err))
	}
	m.creations.WithLabelValues(outcome).Inc()
	for _, s := range steps {
		m.steps.WithLabelValues(s.Name).Observe(s.Took.Seconds())
	}
}

func (m *Metrics) moved(from, to dsec.State) {
	if from != "" {
		m.live.WithLabelValues(string(from)).Dec()
	}
	if to != dsec.Deleted {
		m.live.WithLabelValues(string(to)).Inc()
	}
}

func (m *Metrics) commit(took time.Duration, n int) {
	m.commits.Observe(took.Seconds())
	m.batch.Observe(float64(n))
}
