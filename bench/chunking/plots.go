package chunking

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec/bench/plot"
)

// Plot draws what is stored and what reads cost, by the size of chunks, into dir.
func Plot(dir string, rows []Row) error {
	mib := func(n int64) float64 { return float64(n) / (1 << 20) }
	errs := []error{plot.File(filepath.Join(dir, "chunks-stored.svg"), lines(rows, "What a store holds of all images, with indexes", "MiB",
		func(r Row) float64 { return mib(r.Stored + r.Index) }))}
	for i, g := range rows[0].Groups {
		name := fmt.Sprintf("chunks-%d", i+1)
		errs = append(errs,
			plot.File(filepath.Join(dir, name+"-bytes.svg"), lines(rows, g.Name+": fetched and written, for each byte wanted", "ratio",
				func(r Row) float64 { return float64(r.Groups[i].Demand.Plain) / float64(max(r.Groups[i].Wanted, 1)) })),
			plot.File(filepath.Join(dir, name+"-time.svg"), lines(rows, g.Name+": read by read, 1 MiB ahead", "seconds, modelled",
				func(r Row) float64 { return r.Groups[i].Ahead[1<<20].Time.Seconds() })))
	}
	return errors.Join(errs...)
}

// lines has a line for each kind of scheme. A name is a kind and a size.
func lines(rows []Row, title, y string, value func(Row) float64) plot.Lines {
	l := plot.Lines{Title: title, X: "KiB of a chunk, on average", Y: y, LogX: true}
	for _, r := range rows {
		at := strings.LastIndexByte(r.Scheme, ' ')
		kib, err := strconv.Atoi(r.Scheme[at+1:])
		if at < 0 || err != nil {
			continue
		}
		kind := r.Scheme[:at]
		i := slices.IndexFunc(l.Series, func(s plot.Series) bool { return s.Name == kind })
		if i < 0 {
			i = len(l.Series)
			l.Series = append(l.Series, plot.Series{Name: kind})
		}
		s := &l.Series[i]
		s.X, s.Y = append(s.X, float64(kib)), append(s.Y, value(r))
	}
	return l
}
