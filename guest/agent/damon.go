package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// damon has the kernel itself watch what memory is accessed, and drop files that were not for a while
// (DAMON, in kernels that have it and where nobody else uses it). It is always on trial: some kernels
// run it and it takes nothing, or too little of what is old, and then it is put away for good.
type damon struct {
	kernelFiles
	log *slog.Logger

	on      bool
	unfit   bool
	counted int64 // bytes since it is on
	doubts  int   // rounds, one after the other, in which there was something to take and it took too little
}

const (
	damonSample = 100 * time.Millisecond // between two looks at a page of each region
	damonSum    = time.Second            // over which accesses are counted
	damonLeast  = 100                    // regions: with fewer, what is used hides what is not
	damonTrial  = 12                     // rounds
)

func (d *damon) at(name string) string {
	return filepath.Join(d.sys, "kernel/mm/damon/admin/kdamonds", name)
}

// mark is there while it may be on: an agent that was killed leaves both.
func (d *damon) mark() string { return filepath.Join(d.own, "damon") }

// look decides whether there is one to try. One that an earlier agent left on is switched off.
func (d *damon) look() {
	if _, err := os.Stat(d.mark()); err == nil {
		d.on = true
		if err := d.stop(); err != nil {
			d.log.Warn("switch off what an earlier agent had watch memory", "err", err)
		}
	}
	b, err := os.ReadFile(d.at("nr_kdamonds"))
	d.unfit = err != nil || strings.TrimSpace(string(b)) != "0"
}

// ram are the ranges of the machine's memory, ends included.
func (k kernelFiles) ram() (all [][2]uint64, err error) {
	b, err := os.ReadFile(filepath.Join(k.proc, "iomem"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		where, ok := strings.CutSuffix(line, " : System RAM\n")
		from, to, _ := strings.Cut(where, "-")
		if !ok || strings.HasPrefix(line, " ") {
			continue
		}
		var r [2]uint64
		for i, s := range []string{from, to} {
			if r[i], err = strconv.ParseUint(s, 16, 64); err != nil {
				return nil, err
			}
		}
		all = append(all, r)
	}
	if len(all) == 0 {
		return nil, errors.New("no memory in iomem")
	}
	return all, nil
}

// set writes files of sysfs, in order: name, text.
func (d *damon) set(all ...string) error {
	for i := 0; i < len(all); i += 2 {
		if err := os.WriteFile(d.at(all[i]), []byte(all[i+1]), 0); err != nil {
			return err
		}
	}
	return nil
}

// prepare says what is to be watched, and what is to be done. Nothing runs yet.
func (d *damon) prepare() error {
	const context, scheme = "0/contexts/0/", "0/contexts/0/schemes/0/"
	micro := func(t time.Duration) string { return strconv.FormatInt(t.Microseconds(), 10) }
	ram, err := d.ram()
	if err != nil {
		return err
	}
	err = d.set("nr_kdamonds", "1", "0/contexts/nr_contexts", "1", context+"operations", "paddr",
		context+"monitoring_attrs/intervals/sample_us", micro(damonSample), context+"monitoring_attrs/intervals/aggr_us", micro(damonSum),
		context+"monitoring_attrs/nr_regions/max", strconv.Itoa(10*damonLeast), context+"monitoring_attrs/nr_regions/min", strconv.Itoa(damonLeast),
		context+"targets/nr_targets", "1", context+"targets/0/regions/nr_regions", strconv.Itoa(len(ram)))
	for i, r := range ram {
		at := fmt.Sprintf("%stargets/0/regions/%d/", context, i)
		err = errors.Join(err, d.set(at+"start", strconv.FormatUint(r[0], 10), at+"end", strconv.FormatUint(r[1]+1, 10)))
	}
	if err != nil {
		return err
	}
	err = d.set(context+"schemes/nr_schemes", "1", scheme+"action", "pageout",
		scheme+"access_pattern/sz/min", strconv.Itoa(os.Getpagesize()), scheme+"access_pattern/sz/max", "18446744073709551615",
		scheme+"access_pattern/nr_accesses/min", "0", scheme+"access_pattern/nr_accesses/max", "0",
		scheme+"access_pattern/age/min", strconv.Itoa(int(reclaimAge*reclaimEvery/damonSum)), scheme+"access_pattern/age/max", "4294967295",
		scheme+"quotas/bytes", strconv.Itoa(reclaimMost), scheme+"quotas/reset_interval_ms", strconv.FormatInt(reclaimEvery.Milliseconds(), 10))
	if err != nil {
		return err
	}
	// Memory of programs has nowhere to go.
	err = d.set(scheme+"filters/nr_filters", "1", scheme+"filters/0/type", "anon", scheme+"filters/0/matching", "Y")
	if errors.Is(err, fs.ErrNotExist) { // before Linux 6.3: it looks at it in vain
		err = nil
	}
	return err
}

func (d *damon) start() error {
	if err := d.prepare(); err != nil {
		return err
	}
	if err := os.WriteFile(d.mark(), nil, 0o600); err != nil {
		return err
	}
	d.on, d.counted = true, 0
	return d.set("0/state", "on")
}

// stop ends it, and returns when it has ended. What it knew of ages is forgotten.
func (d *damon) stop() error {
	if !d.on {
		return nil
	}
	d.on = false
	return errors.Join(d.set("0/state", "off", "nr_kdamonds", "0"), os.Remove(d.mark()))
}

// taken is how many bytes it has taken since the last time.
func (d *damon) taken() (int64, error) {
	if err := d.set("0/state", "update_schemes_stats"); err != nil {
		return 0, err
	}
	b, err := os.ReadFile(d.at("0/contexts/0/schemes/0/stats/sz_applied"))
	if err != nil {
		return 0, err
	}
	now, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	n := now - d.counted
	d.counted = now
	return n, err
}

// round has it on while the machine is calm, and returns what it has taken.
func (d *damon) round(calm bool) (n int64) {
	var err error
	if d.on {
		n, err = d.taken()
	}
	switch {
	case d.unfit:
	case err != nil:
		d.putAway("the kernel cannot watch memory", err)
	case calm && !d.on:
		if err = d.start(); err != nil {
			d.putAway("the kernel cannot watch memory", err)
		}
	case !calm:
		if err = d.stop(); err != nil {
			d.putAway("the kernel cannot watch memory", err)
		}
	}
	return n
}

// takes says whether it is left to it to take n bytes that are old. In a round of each trial it has to
// take an eighth of that.
func (d *damon) takes(n, took int64) bool {
	switch {
	case d.unfit:
	case took >= n/8:
		d.doubts = 0
	default:
		if d.doubts++; d.doubts > damonTrial {
			d.putAway("the kernel watches memory, and finds too little of what is old", nil)
		}
	}
	return !d.unfit
}

func (d *damon) putAway(why string, err error) {
	d.log.Info(why, "err", errors.Join(err, d.stop()))
	d.unfit = true
}
