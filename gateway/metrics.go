package gateway

import (
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// metrics of the gateway. No label names a sandbox, a project or a caller: the
// number of series does not grow with use.
type metrics struct {
	reg      *prometheus.Registry
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	creates  *prometheus.CounterVec
	create   prometheus.Histogram
	steps    *prometheus.HistogramVec
	sessions prometheus.Gauge
}

var fine = []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60}

func newMetrics(c Cluster) *metrics {
	m := &metrics{reg: prometheus.NewRegistry()}
	m.requests = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_requests_total",
		Help: "Requests by route and HTTP status."}, []string{"route", "status"})
	m.seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dsec_request_seconds",
		Help: "Time of requests by route, streams included.", Buckets: fine}, []string{"route"})
	m.creates = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_creates_total",
		Help: "Creations by error class; ok where there is none."}, []string{"class"})
	m.create = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_create_seconds",
		Help: "Time of creations that succeeded, as the gateway saw them.", Buckets: fine})
	m.steps = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dsec_create_step_seconds",
		Help: "Time of each step of creations.", Buckets: fine}, []string{"step"})
	m.sessions = prometheus.NewGauge(prometheus.GaugeOpts{Name: "dsec_event_sessions", Help: "Open event streams."})
	m.reg.MustRegister(m.requests, m.seconds, m.creates, m.create, m.steps, m.sessions, &nodeCollector{c},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.reg, promhttp.HandlerOpts{})
}

func (m *metrics) request(route string, status int, took time.Duration) {
	m.requests.WithLabelValues(route, strconv.Itoa(status)).Inc()
	m.seconds.WithLabelValues(route).Observe(took.Seconds())
}

func (m *metrics) created(err error, steps []*dsecv1.Step, took time.Duration) {
	if err != nil {
		m.creates.WithLabelValues(string(dsec.ClassOf(err))).Inc()
		return
	}
	m.creates.WithLabelValues("ok").Inc()
	m.create.Observe(took.Seconds())
	for _, s := range steps {
		m.steps.WithLabelValues(s.Name).Observe(s.Took)
	}
}

// nodeCollector reports what the last heartbeats said.
type nodeCollector struct{ c Cluster }

var (
	nodeAlive = prometheus.NewDesc("dsec_node_alive", "1 while heartbeats come.", []string{"node"}, nil)
	nodeLive  = prometheus.NewDesc("dsec_node_sandboxes", "Live sandboxes of a node.", []string{"node"}, nil)
	nodeMax   = prometheus.NewDesc("dsec_node_sandboxes_max", "Most live sandboxes of a node.", []string{"node"}, nil)
	nodeStart = prometheus.NewDesc("dsec_node_starting", "Sandboxes that are being created.", []string{"node"}, nil)
	nodeUsed  = prometheus.NewDesc("dsec_node_committed", "Committed fraction of a budget.", []string{"node", "budget"}, nil)
)

func (n *nodeCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{nodeAlive, nodeLive, nodeMax, nodeStart, nodeUsed} {
		ch <- d
	}
}

func (n *nodeCollector) Collect(ch chan<- prometheus.Metric) {
	for _, x := range n.c.Nodes() {
		gauge := func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{x.Id}, labels...)...)
		}
		alive := 0.0
		if x.Alive {
			alive = 1
		}
		gauge(nodeAlive, alive)
		gauge(nodeLive, float64(x.Live))
		gauge(nodeMax, float64(x.MaxLive))
		gauge(nodeStart, float64(x.Starting))
		gauge(nodeUsed, x.Cpu, "cpu")
		gauge(nodeUsed, x.Memory, "memory")
		gauge(nodeUsed, x.Disk, "disk")
	}
}

// nodeMetrics passes on what a node counts: it has no listener of its own.
func (g *Gateway) nodeMetrics(w http.ResponseWriter, r *http.Request) error {
	node, err := dsec.ParseNodeID(r.PathValue("node"))
	if err != nil {
		return err
	}
	resp, err := g.cfg.Cluster.Do(r.Context(), node, wire.Request{Method: http.MethodGet, Path: wire.PathMetrics})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
	_, err = io.Copy(w, io.LimitReader(resp.Body, maxNodeMetrics))
	return err
}

const maxNodeMetrics = 4 << 20
