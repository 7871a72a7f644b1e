package daemon

import (
	"context"
	"encoding/json"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/stack"
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
	counts, err := askCounts(c.loader)
	if err != nil {
		return
	}
	out <- prometheus.MustNewConstMetric(uncachedReads, prometheus.CounterValue, float64(counts.Uncached.Reads))
	out <- prometheus.MustNewConstMetric(uncachedBytes, prometheus.CounterValue, float64(counts.Uncached.Bytes))
}

func askCounts(c *loader.Client) (loader.Counts, error) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeWithin)
	defer cancel()
	return c.Counts(ctx)
}

// loaderBlobCounts are those of the loader's object storage, while one runs.
func loaderBlobCounts(c *loader.Client) blobCounts {
	return blobCounts{"loader", func() (s stack.Stats, ok bool) {
		counts, err := askCounts(c)
		return s, err == nil && json.Unmarshal(counts.Blobs, &s) == nil
	}}
}

// registerCounts shows what object storage and the loader count.
func (a *agent) registerCounts() error {
	own := blobCounts{"agent", func() (stack.Stats, bool) { return a.blobs.Stats(), true }}
	for _, c := range []prometheus.Collector{own, uncachedCounts{a.loader}, loaderBlobCounts(a.loader)} {
		if err := a.counts.Register(c); err != nil {
			return dsec.E(dsec.Internal, "register metrics", string(a.id), err)
		}
	}
	return nil
}
