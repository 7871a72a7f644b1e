package chunking

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Study compares schemes on one set of layers and accesses.
type Study struct {
	Layers   []*Data
	Groups   []Group
	Line     Line   // for what is modelled and measured; Parallel is varied
	Dir      string // where packs and fetched data go
	Level    zstd.EncoderLevel
	Progress func(line string)
}

// Group is a kind of access. Each of them starts on a node that has nothing.
type Group struct {
	Name     string
	Accesses []Access
	Waits    int // how many, from the first, are also measured read by read
}

// Row is what a scheme costs.
type Row struct {
	Scheme string        `json:"scheme"`
	Chunks int           `json:"chunks"`
	Unique int           `json:"unique"`
	Plain  int64         `json:"plain"`
	Stored int64         `json:"stored"`
	Index  int64         `json:"index"`
	Took   time.Duration `json:"took"`
	Packs  []int64       `json:"packs"` // bytes that each layer brought
	Groups []GroupCost   `json:"groups"`
	// All accesses one after the other on one node: bytes fetched if chunks are
	// kept for each layer, and if one that any layer brought does for all.
	Alone  int64 `json:"alone"`
	Shared int64 `json:"shared"`
}

// GroupCost sums up the accesses of a group.
type GroupCost struct {
	Name     string                   `json:"name"`
	Wanted   int64                    `json:"wanted"`   // bytes of the data files
	Demand   Cost                     `json:"demand"`   // modelled, read by read
	Ahead    map[int64]Cost           `json:"ahead"`    // modelled, read by read, by what comes with a read that waits
	Gaps     map[int64]Cost           `json:"gaps"`     // modelled, all at once, by tolerated gap
	Prefetch Cost                     `json:"prefetch"` // with the line's gap
	Waited   time.Duration            `json:"waited"`   // measured, read by read, of the first Waits
	Modelled time.Duration            `json:"modelled"` // the same modelled
	Took     map[string]time.Duration `json:"took"`     // measured, all at once, by requests at one time
}

// parallel GETs that are measured; the first is also what is modelled.
var parallel = []int{8, 16}

// gaps that are modelled.
var gaps = []int64{0, 64 << 10, 256 << 10, 1 << 20}

// aheads that are modelled, plain bytes.
var aheads = []int64{256 << 10, 1 << 20}

// Run measures each scheme.
func (s *Study) Run(ctx context.Context, schemes []Scheme) ([]Row, error) {
	var rows []Row
	for _, sc := range schemes {
		r, err := s.one(ctx, sc)
		if err != nil {
			return rows, fmt.Errorf("measure %s: %w", sc.Name, err)
		}
		rows = append(rows, r)
		if s.Progress != nil {
			s.Progress(fmt.Sprintf("%-18s %d chunks, %d MiB stored, %s", r.Scheme, r.Chunks, r.Stored>>20, r.Took.Round(time.Second)))
		}
	}
	return rows, nil
}

func (s *Study) one(ctx context.Context, sc Scheme) (Row, error) {
	p, err := Pack(ctx, sc, s.Layers, filepath.Join(s.Dir, "packs"), s.Level)
	if err != nil {
		return Row{}, err
	}
	defer func() { _ = p.Remove() }() // the whole directory goes with its owner
	row := Row{Scheme: sc.Name, Chunks: p.Chunks, Unique: p.Unique, Plain: p.Plain, Stored: p.Stored, Index: p.Index, Took: p.Took, Packs: p.Packs}
	s.Line.Parallel = parallel[0]
	alone, shared := NewState(false), NewState(true)
	for _, g := range s.Groups {
		c, err := s.group(ctx, p, g)
		if err != nil {
			return row, err
		}
		row.Groups = append(row.Groups, c)
		for _, a := range g.Accesses {
			row.Alone += p.Prefetch(a, s.Line, alone).Bytes
			row.Shared += p.Prefetch(a, s.Line, shared).Bytes
		}
	}
	return row, nil
}

func (s *Study) group(ctx context.Context, p *Packed, g Group) (GroupCost, error) {
	c := GroupCost{Name: g.Name, Ahead: map[int64]Cost{}, Gaps: map[int64]Cost{}, Took: map[string]time.Duration{}}
	line := s.Line
	line.Parallel = parallel[0]
	for i, a := range g.Accesses {
		d := p.Demand(a, line, nil)
		if i < g.Waits {
			c.Modelled += d.Time
		}
		c.Wanted += a.Wanted()
		c.Demand.sum(d)
		c.Prefetch.sum(p.Prefetch(a, line, nil))
		for _, n := range aheads {
			l, sum := line, c.Ahead[n]
			l.Ahead = n
			sum.sum(p.Demand(a, l, nil))
			c.Ahead[n] = sum
		}
		for _, gap := range gaps {
			l, sum := line, c.Gaps[gap]
			l.Gap = gap
			sum.sum(p.Prefetch(a, l, nil))
			c.Gaps[gap] = sum
		}
	}
	server, err := Serve(p.Dir, line.Latency)
	if err != nil {
		return c, err
	}
	defer server.Close()
	for _, n := range parallel {
		line.Parallel = n
		took, waited, err := s.measure(ctx, p, g, server, line)
		if err != nil {
			return c, err
		}
		c.Took[fmt.Sprint(n)] = took
		if n == parallel[0] {
			c.Waited = waited
		}
	}
	return c, nil
}

func (c *Cost) sum(o Cost) {
	c.Bytes += o.Bytes
	c.Plain += o.Plain
	c.Chunks += o.Chunks
	c.Requests += o.Requests
	c.Stalls += o.Stalls
	c.Time += o.Time
}

// measure fetches for real, each access into an empty file.
func (s *Study) measure(ctx context.Context, p *Packed, g Group, server *Server, l Line) (took, waited time.Duration, err error) {
	path := filepath.Join(s.Dir, "fetched")
	fetch := func(a Access, how func(*Fetcher, Access) (time.Duration, error)) (time.Duration, error) {
		to, err := os.Create(path)
		if err != nil {
			return 0, err
		}
		defer to.Close()
		f, err := NewFetcher(server, l, to)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		if err := f.Warm(ctx); err != nil {
			return 0, err
		}
		return how(f, a)
	}
	for i, a := range g.Accesses {
		d, err := fetch(a, func(f *Fetcher, a Access) (time.Duration, error) { return f.Prefetch(ctx, p, a) })
		if err != nil {
			return 0, 0, err
		}
		took += d
		if i < g.Waits && l.Parallel == parallel[0] {
			if d, err = fetch(a, func(f *Fetcher, a Access) (time.Duration, error) { return f.Demand(ctx, p, a) }); err != nil {
				return 0, 0, err
			}
			waited += d
		}
	}
	return took, waited, os.Remove(path)
}

// Print writes a table of what is stored and one for each group.
func Print(w io.Writer, rows []Row) {
	mib := func(n int64) string { return fmt.Sprintf("%.1f", float64(n)/(1<<20)) }
	tw := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "SCHEME\tCHUNKS\tUNIQUE\tMEAN KiB\tUNIQUE PLAIN MiB\tSTORED MiB\tINDEX MiB\tSUM MiB\tALL ACCESSES, A LAYER ALONE MiB\tSHARED MiB\tMADE IN")
	for _, r := range rows {
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Scheme, r.Chunks, r.Unique, r.Plain/int64(max(r.Unique, 1))>>10,
			mib(r.Plain), mib(r.Stored), mib(r.Index), mib(r.Stored+r.Index), mib(r.Alone), mib(r.Shared), r.Took.Round(100*time.Millisecond))
	}
	tw.Flush()
	if len(rows) == 0 {
		return
	}
	for i, g := range rows[0].Groups {
		fmt.Fprintf(w, "\n%s: %s MiB wanted, read by read\n", g.Name, mib(g.Wanted))
		tw := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
		fmt.Fprintln(tw, "SCHEME\tMiB\tPLAIN MiB\tx WANTED\tSTALLS\tMODEL s\tPART: MODEL s\tMEASURED s\tAHEAD 256 KiB: MiB\tSTALLS\tMODEL s\tAHEAD 1 MiB: MiB\tSTALLS\tMODEL s")
		for _, r := range rows {
			g, d := r.Groups[i], r.Groups[i].Demand
			fmt.Fprintf(tw, "%s\t%s\t%s\t%.2f\t%d\t%.2f\t%.2f\t%.2f", r.Scheme, mib(d.Bytes), mib(d.Plain), float64(d.Plain)/float64(max(g.Wanted, 1)),
				d.Stalls, d.Time.Seconds(), g.Modelled.Seconds(), g.Waited.Seconds())
			for _, n := range aheads {
				fmt.Fprintf(tw, "\t%s\t%d\t%.2f", mib(g.Ahead[n].Bytes), g.Ahead[n].Stalls, g.Ahead[n].Time.Seconds())
			}
			fmt.Fprintln(tw)
		}
		tw.Flush()
		fmt.Fprintf(w, "\n%s: all at once\n", g.Name)
		fmt.Fprintln(tw, "SCHEME\tMiB\tPLAIN MiB\tGETS\tMODEL s\tMEASURED 8 s\tMEASURED 16 s\tGETS, MiB BY GAP 0\t64 KiB\t256 KiB\t1 MiB")
		for _, r := range rows {
			g, p := r.Groups[i], r.Groups[i].Prefetch
			fmt.Fprintf(tw, "%s\t%s\t%s\t%d\t%.2f\t%.2f\t%.2f", r.Scheme, mib(p.Bytes), mib(p.Plain), p.Requests, p.Time.Seconds(),
				g.Took["8"].Seconds(), g.Took["16"].Seconds())
			for _, gap := range gaps {
				fmt.Fprintf(tw, "\t%d, %s", g.Gaps[gap].Requests, mib(g.Gaps[gap].Bytes))
			}
			fmt.Fprintln(tw)
		}
		tw.Flush()
	}
}
