package daemon

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/layer/ondemand/loader"
)

// uncachedCounts shows what the loader has answered without keeping it. While none
// runs there are no numbers.
type uncachedCounts struct{ loader *loader.Client }

var (
	uncachedReads = prometheus.NewDesc("dsec_layer_uncached_reads_total",
		"Reads of layers that were answered without keeping what was read, because the disk is full or node.layer_cache is reached.", nil, nil)
	uncachedBytes = prometheus.NewDesc("dsec_layer_uncached_bytes_total", "Bytes of these reads.", nil, nil)
)

// scrapeWithin is how long the loader may take to tell.
const scrapeWithin = 2 * time.Second

// Describe implements prometheus.Collector.
func (c uncachedCounts) Describe(out chan<- *prometheus.Desc) {
	out <- uncachedReads
	out <- uncachedBytes
}

// Collect implements prometheus.Collector.
func (c uncachedCounts) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeWithin)
	defer cancel()
	counts, err := c.loader.Counts(ctx)
	if err != nil {
		return
	}
	out <- prometheus.MustNewConstMetric(uncachedReads, prometheus.CounterValue, float64(counts.Uncached.Reads))
	out <- prometheus.MustNewConstMetric(uncachedBytes, prometheus.CounterValue, float64(counts.Uncached.Bytes))
}
