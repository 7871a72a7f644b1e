package cgroup

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// picker spreads groups over CPUs. k CPUs are always one of the blocks that
// start at a multiple of k, so that the number of different sets, and of v1
// groups made for them, stays small on large machines.
type picker struct {
	all []int // CPUs that may be used, ascending

	mu   sync.Mutex
	load map[int]float64 // cores promised on each
}

func newPicker(all []int) *picker { return &picker{all: all, load: map[int]float64{}} }

// pick chooses k CPUs for a group that may use up to cores of them, and counts
// it there. It returns nil if k is 0 or no restriction.
func (p *picker) pick(k int, cores float64) []int {
	if k <= 0 || k >= len(p.all) {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var best []int
	least := 0.0
	for start := 0; start < len(p.all); start += k {
		block := p.all[min(start, len(p.all)-k):][:k]
		sum := 0.0
		for _, c := range block {
			sum += p.load[c]
		}
		if best == nil || sum < least {
			best, least = block, sum
		}
	}
	p.countLocked(best, cores)
	return slices.Clone(best)
}

// count adds cores to a set; negative cores take them away.
func (p *picker) count(set []int, cores float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.countLocked(set, cores)
}

func (p *picker) countLocked(set []int, cores float64) {
	for _, c := range set {
		p.load[c] += cores / float64(len(set))
	}
}

// cores is what a group counts for where it is: its quota, or all it sees.
func (l Limits) cores() float64 {
	if l.CPU > 0 {
		return l.CPU
	}
	return float64(max(l.Visible, 1))
}

// parseCPUs reads a list like "0-3,8".
func parseCPUs(s string) ([]int, error) {
	var all []int
	for part := range strings.SplitSeq(strings.TrimSpace(s), ",") {
		if part == "" {
			continue
		}
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		a, err1 := strconv.Atoi(lo)
		b, err2 := strconv.Atoi(hi)
		if err1 != nil || err2 != nil || a < 0 || b < a || b-a > 1<<16 {
			return nil, fmt.Errorf("parse CPU list %q", s)
		}
		for c := a; c <= b; c++ {
			all = append(all, c)
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// formatCPUs is the inverse of parseCPUs, without ranges.
func formatCPUs(set []int) string {
	s := make([]string, len(set))
	for i, c := range set {
		s[i] = strconv.Itoa(c)
	}
	return strings.Join(s, ",")
}

// openCPUs finds the CPUs that groups may use and counts the groups that
// exist already.
func (r *Root) openCPUs() error {
	d, file := r.unified, "cpuset.cpus.effective"
	if r.layout.version == Hybrid {
		d, file = r.v1["cpuset"], "cpuset.effective_cpus"
	}
	text, err := d.read(file)
	if errors.Is(err, unix.ENOENT) {
		r.cpus = newPicker(nil) // no cpuset controller: every CPU is visible
		return nil
	}
	if err != nil {
		return err
	}
	all, err := parseCPUs(text)
	if err != nil {
		return err
	}
	r.cpus = newPicker(all)
	names, err := r.List()
	if err != nil {
		return err
	}
	for _, n := range names {
		if s, err := r.readSettings(n); err == nil {
			r.cpus.count(s.CPUs, s.Limits.cores())
		}
	}
	return nil
}

// inheritCPUs gives a v1 cpuset group what its parent has: it is born with
// none, and nothing can run in it.
func inheritCPUs(d dir) error {
	for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
		v, err := d.read("../" + f)
		if err != nil {
			return err
		}
		if err := d.write(f, v); err != nil {
			return err
		}
	}
	return nil
}
