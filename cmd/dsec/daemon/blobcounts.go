package daemon

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/blob/stack"
)

// blobCounts shows what a store counts.
type blobCounts struct{ store *stack.Store }

func blobDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dsec_blob_"+name, help, labels, nil)
}

var (
	blobRequests  = blobDesc("requests_total", "Requests to object storage.", "op")
	blobFailures  = blobDesc("failures_total", "Requests to object storage, and bodies, that failed.", "class")
	blobInFlight  = blobDesc("in_flight", "Requests at this moment, bodies being read among them.")
	blobRead      = blobDesc("read_bytes_total", "Bytes read from object storage.")
	blobWritten   = blobDesc("written_bytes_total", "Bytes written to object storage.")
	blobRetries   = blobDesc("retries_total", "Requests made again because object storage was away.")
	blobHedges    = blobDesc("hedges_total", "Second requests for reads that were late.")
	blobHedgesWon = blobDesc("hedges_won_total", "Second requests that were answered first.")
	blobNoHedge   = blobDesc("hedges_denied_total", "Late reads that got no second request: their share was used up, or no place was free.")
	blobWaits     = blobDesc("waits_total", "Requests that waited for a place.")
	blobWaited    = blobDesc("wait_seconds_total", "Time that requests waited for a place.")
	blobThrottled = blobDesc("throttled_seconds_total", "Time that bodies were held back for the limit of bandwidth.")
)

// Describe implements prometheus.Collector.
func (c blobCounts) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{blobRequests, blobFailures, blobInFlight, blobRead, blobWritten, blobRetries, blobHedges, blobHedgesWon,
		blobNoHedge, blobWaits, blobWaited, blobThrottled} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c blobCounts) Collect(out chan<- prometheus.Metric) {
	s := c.store.Stats()
	count := func(d *prometheus.Desc, n float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, n, labels...)
	}
	for op, n := range s.Requests {
		count(blobRequests, float64(n), op)
	}
	for class, n := range s.Failures {
		count(blobFailures, float64(n), string(class))
	}
	out <- prometheus.MustNewConstMetric(blobInFlight, prometheus.GaugeValue, float64(s.InFlight))
	count(blobRead, float64(s.Read))
	count(blobWritten, float64(s.Written))
	count(blobRetries, float64(s.Retries))
	count(blobHedges, float64(s.Hedge.Hedges))
	count(blobHedgesWon, float64(s.Hedge.Won))
	count(blobNoHedge, float64(s.Hedge.Denied))
	count(blobWaits, float64(s.Limit.Waits))
	count(blobWaited, s.Limit.Waited.Seconds())
	count(blobThrottled, s.Limit.Throttled.Seconds())
}
