package daemon

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/blob/stack"
)

// blobCounts shows what the object storage of a process counts.
type blobCounts struct {
	by    string                     // the process
	stats func() (stack.Stats, bool) // false: there are none now
}

// blobDescs are what is shown of one process.
type blobDescs struct {
	requests, failures, inFlight, read, written, retries, hedges, hedgesWon, noHedge, waits, waited, throttled *prometheus.Desc
}

func (c blobCounts) descs() blobDescs {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("dsec_blob_"+name, help, labels, prometheus.Labels{"by": c.by})
	}
	return blobDescs{
		requests:  d("requests_total", "Requests to object storage.", "op"),
		failures:  d("failures_total", "Requests to object storage, and bodies, that failed.", "class"),
		inFlight:  d("in_flight", "Requests at this moment, bodies being read among them."),
		read:      d("read_bytes_total", "Bytes read from object storage."),
		written:   d("written_bytes_total", "Bytes written to object storage."),
		retries:   d("retries_total", "Requests made again because object storage was away."),
		hedges:    d("hedges_total", "Second requests for reads that were late."),
		hedgesWon: d("hedges_won_total", "Second requests that were answered first."),
		noHedge:   d("hedges_denied_total", "Late reads that got no second request: their share was used up, or no place was free."),
		waits:     d("waits_total", "Requests that waited for a place."),
		waited:    d("wait_seconds_total", "Time that requests waited for a place."),
		throttled: d("throttled_seconds_total", "Time that bodies were held back for the limit of bandwidth."),
	}
}

// Describe implements prometheus.Collector.
func (c blobCounts) Describe(out chan<- *prometheus.Desc) {
	d := c.descs()
	for _, one := range []*prometheus.Desc{d.requests, d.failures, d.inFlight, d.read, d.written, d.retries, d.hedges, d.hedgesWon, d.noHedge, d.waits, d.waited, d.throttled} {
		out <- one
	}
}

// Collect implements prometheus.Collector.
func (c blobCounts) Collect(out chan<- prometheus.Metric) {
	s, ok := c.stats()
	if !ok {
		return
	}
	d := c.descs()
	count := func(d *prometheus.Desc, n float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, n, labels...)
	}
	for op, n := range s.Requests {
		count(d.requests, float64(n), op)
	}
	for class, n := range s.Failures {
		count(d.failures, float64(n), string(class))
	}
	out <- prometheus.MustNewConstMetric(d.inFlight, prometheus.GaugeValue, float64(s.InFlight))
	count(d.read, float64(s.Read))
	count(d.written, float64(s.Written))
	count(d.retries, float64(s.Retries))
	count(d.hedges, float64(s.Hedge.Hedges))
	count(d.hedgesWon, float64(s.Hedge.Won))
	count(d.noHedge, float64(s.Hedge.Denied))
	count(d.waits, float64(s.Limit.Waits))
	count(d.waited, s.Limit.Waited.Seconds())
	count(d.throttled, s.Limit.Throttled.Seconds())
}
