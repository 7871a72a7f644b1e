package daemon

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/layer/ondemand/loader"
)

// throughCounts shows what the loader has answered without keeping it. While none
// runs there are no numbers.
type throughCounts struct{ loader *loader.Client }

var (
	throughReads = prometheus.NewDesc("dsec_layer_through_reads_total",
		"Reads of layers that were answered without keeping what was read, because the disk is full or node.layer_cache is reached.", nil, nil)
	throughBytes = prometheus.NewDesc("dsec_layer_through_bytes_total", "Bytes of these reads.", nil, nil)
)

// scrapeWithin is how long the loader may take to tell.
const scrapeWithin = 2 * time.Second

// Describe implements prometheus.Collector.
func (c throughCounts) Describe(out chan<- *prometheus.Desc) {
	out <- throughReads
	out <- throughBytes
}

// Collect implements prometheus.Collector.
func (c throughCounts) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeWithin)
	defer cancel()
	t, err := c.loader.Through(ctx)
	if err != nil {
		return
	}
	out <- prometheus.MustNewConstMetric(throughReads, prometheus.CounterValue, float64(t.Reads))
	out <- prometheus.MustNewConstMetric(throughBytes, prometheus.CounterValue, float64(t.Bytes))
}
