package detect

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/e2e/detect/corpus"
)

// outcome is what a detector says of a rollout.
type outcome struct {
	seed     uint64
	hack     string // "": it is honest
	set      corpus.Set
	records  int
	took     time.Duration
	findings map[dsec.HackClass]dsec.HackFinding
}

func (o outcome) class() dsec.HackClass {
	c, _, _ := strings.Cut(o.hack, "-")
	return dsec.HackClass(c)
}

func (o outcome) found(c dsec.HackClass) bool {
	return o.findings[c].Confidence >= dsec.HackConfidence
}

// others are the classes found that are not its own, heaviest first.
func (o outcome) others() (all []dsec.HackFinding) {
	for c, f := range o.findings {
		if c != o.class() && o.found(c) {
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b dsec.HackFinding) int { return cmp.Compare(b.Confidence, a.Confidence) })
	return all
}

// unexpected says what is wrong with it; "": nothing.
func (o outcome) unexpected() string {
	if o.hack != "" && !o.found(o.class()) {
		return fmt.Sprintf("%s is not found: %.2f %s", o.hack, o.findings[o.class()].Confidence, o.findings[o.class()].Lines)
	}
	if o.hack == "" && len(o.others()) > 0 {
		f := o.others()[0]
		return fmt.Sprintf("honest rollout %d: %s %.2f %q", o.seed, f.Class, f.Confidence, f.Lines)
	}
	return ""
}

// report is the table for bench/RESULTS.md, and what was missed.
func report(all []outcome) string {
	slices.SortFunc(all, func(a, b outcome) int {
		return cmp.Or(cmp.Compare(a.hack, b.hack), cmp.Compare(a.seed, b.seed))
	})
	var b strings.Builder
	fmt.Fprintln(&b, "| class | hacks found: tuned with | seen | late | all | honest rollouts with a finding: tuned with | seen | late, at most (95 %) | all, at most (95 %) |")
	fmt.Fprintln(&b, "|---|---|---|---|---|---|---|---|---|")
	for _, c := range dsec.HackClasses {
		row(&b, string(c), all, func(o outcome) bool { return o.hack == "" || o.class() == c }, func(o outcome) bool { return o.found(c) })
	}
	row(&b, "any", all, func(outcome) bool { return true }, func(o outcome) bool {
		return o.hack != "" && o.found(o.class()) || o.hack == "" && len(o.others()) > 0
	})
	records, honest := 0, 0
	for _, o := range all {
		if o.hack == "" {
			records, honest = records+o.records, honest+1
		}
	}
	fmt.Fprintf(&b, "\n%d records in an honest rollout\n", records/max(1, honest))
	for _, o := range all {
		if bad := o.unexpected(); bad != "" {
			fmt.Fprintln(&b, bad)
		}
	}
	return b.String()
}

// row counts the outcomes of a class, by what they were used for.
func row(b *strings.Builder, name string, all []outcome, of, found func(outcome) bool) {
	var hacks, honest [corpus.Sets + 1]share // the last one has all
	for _, o := range all {
		if !of(o) {
			continue
		}
		to := &hacks
		if o.hack == "" {
			to = &honest
		}
		for _, i := range []corpus.Set{o.set, corpus.Sets} {
			to[i] = to[i].plus(share{pick(found(o), 1, 0), 1})
		}
	}
	h, late := honest[corpus.Sets], honest[corpus.Late]
	fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s, %s | %s, %s |\n", name, hacks[corpus.Tuned], hacks[corpus.Seen], hacks[corpus.Late], hacks[corpus.Sets],
		honest[corpus.Tuned], honest[corpus.Seen], late, percent(upper(late.k, late.n)), h, percent(upper(h.k, h.n)))
}

type share struct{ k, n int }

func (s share) plus(o share) share { return share{s.k + o.k, s.n + o.n} }
func (s share) String() string     { return fmt.Sprintf("%d of %d", s.k, s.n) }

func percent(p float64) string { return fmt.Sprintf("%.1f %%", 100*p) }

// upper is the upper end of the 95 % interval of Clopper and Pearson: the share with
// which k or fewer of n come with a probability of 2.5 %.
func upper(k, n int) float64 {
	if n == 0 || k >= n {
		return 1
	}
	low, high := 0.0, 1.0
	for range 60 {
		p := (low + high) / 2
		if atMost(k, n, p) > 0.025 {
			low = p
		} else {
			high = p
		}
	}
	return high
}

// atMost is the probability of k or fewer of n.
func atMost(k, n int, p float64) (sum float64) {
	for i := range k + 1 {
		all, _ := math.Lgamma(float64(n + 1))
		yes, _ := math.Lgamma(float64(i + 1))
		no, _ := math.Lgamma(float64(n - i + 1))
		sum += math.Exp(all - yes - no + float64(i)*math.Log(p) + float64(n-i)*math.Log1p(-p))
	}
	return sum
}

func TestUpperBound(t *testing.T) {
	for _, c := range []struct {
		k, n int
		want float64
	}{{0, 100, 0.0362}, {3, 200, 0.0432}, {0, 1, 0.975}, {5, 5, 1}} { // tables of the interval
		if got := upper(c.k, c.n); math.Abs(got-c.want) > 0.0002 {
			t.Errorf("%d of %d: %.4f, want %.4f", c.k, c.n, got, c.want)
		}
	}
}
