package bench

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/opendsec/dsec"
)

// Steps gathers how long the steps of many creations took.
type Steps struct {
	mu    sync.Mutex
	names []string // in the order of their first sight
	took  map[string][]time.Duration
}

func (s *Steps) add(steps ...dsec.Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.took == nil {
		s.took = map[string][]time.Duration{}
	}
	for _, st := range steps {
		if _, ok := s.took[st.Name]; !ok {
			s.names = append(s.names, st.Name)
		}
		s.took[st.Name] = append(s.took[st.Name], st.Took)
	}
}

// Print writes the median and the 99th percentile of each step.
func (s *Steps) Print(w io.Writer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tw := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "STEP\tP50\tP99\tSAMPLES")
	for _, n := range s.names {
		d := s.took[n]
		slices.Sort(d)
		fmt.Fprintf(tw, "%s\t%s\t%s\t%d\n", n, Quantile(d, .5).Round(time.Microsecond), Quantile(d, .99).Round(time.Microsecond), len(d))
	}
	tw.Flush()
}
