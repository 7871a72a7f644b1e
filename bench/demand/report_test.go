package demand

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opendsec/dsec/bench/plot"
)

// middle is, for each way in the order of their first sight, the round that was
// done in the median time.
func middle(all []outcome) (out []outcome) {
	var ways []string
	for _, o := range all {
		if !slices.Contains(ways, o.way) {
			ways = append(ways, o.way)
		}
	}
	for _, way := range ways {
		of := slices.DeleteFunc(slices.Clone(all), func(o outcome) bool { return o.way != way })
		slices.SortFunc(of, func(a, b outcome) int { return int(a.last() - b.last()) })
		out = append(out, of[len(of)/2])
	}
	return out
}

// report prints the median rounds and draws them, where DSEC_DEMAND_PLOTS says.
func report(t *testing.T, n int, all []outcome) {
	mid, text := middle(all), head
	names := make([]string, len(mid))
	ready, done, fetched, written := plot.Series{Name: "all ready"}, plot.Series{Name: "all done"}, plot.Series{Name: "fetched"}, plot.Series{Name: "written"}
	for i, o := range mid {
		text += "\n" + o.String()
		names[i] = o.way
		ready.Y, done.Y = append(ready.Y, o.ready[len(o.ready)-1].Seconds()), append(done.Y, o.last().Seconds())
		fetched.Y, written.Y = append(fetched.Y, mib(o.fetched)), append(written.Y, mib(o.written))
	}
	t.Logf("%d sandboxes, the median of the rounds:\n%s", n, text)
	dir := os.Getenv("DSEC_DEMAND_PLOTS")
	if dir == "" {
		return
	}
	must(t, errors.Join(
		plot.File(filepath.Join(dir, "burst-time.svg"), plot.Bars{Title: fmt.Sprintf("A burst of %d sandboxes, 20 ms to the store", n), Y: "seconds",
			Groups: names, Series: []plot.Series{ready, done}}),
		plot.File(filepath.Join(dir, "burst-bytes.svg"), plot.Bars{Title: "Bytes fetched and written for it", Y: "MiB",
			Groups: names, Series: []plot.Series{fetched, written}})))
}
