package user

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// plainEvery is how often progress is a line where there is no terminal.
const plainEvery = 5 * time.Second

// bar is the progress of one thing on stderr: a bar on a terminal, a line now
// and then elsewhere, nothing with -o json.
type bar struct {
	name   string
	total  int64
	format func(n int64) string

	mu     sync.Mutex
	n      int64
	p      *mpb.Progress // nil without a terminal
	b      *mpb.Bar
	lines  io.Writer // nil: silent
	spoken time.Time
}

func plainCount(n int64) string { return fmt.Sprint(n) }

// newBar begins; total 0 is unknown.
func newBar(c *cobra.Command, name string, total int64, format func(int64) string) *bar {
	b := &bar{name: name, total: total, format: format, spoken: time.Now()}
	if j, _ := asJSON(c); j {
		return b
	}
	f, ok := c.ErrOrStderr().(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		b.lines = c.ErrOrStderr()
		return b
	}
	b.p = mpb.New(mpb.WithOutput(f), mpb.WithWidth(40), mpb.WithRefreshRate(120*time.Millisecond))
	b.b = b.p.AddBar(total,
		mpb.BarRemoveOnComplete(),
		mpb.PrependDecorators(decor.Name(name+" ")),
		mpb.AppendDecorators(decor.Any(func(s decor.Statistics) string {
			if s.Total <= 0 {
				return format(s.Current)
			}
			return format(s.Current) + " / " + format(s.Total)
		})))
	return b
}

func (b *bar) add(n int64) { b.set(b.n+n, b.total) }

// set says how far it is.
func (b *bar) set(n, total int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n, b.total = n, total
	if b.b != nil {
		if total > 0 {
			b.b.SetTotal(total, false)
		}
		b.b.SetCurrent(n)
		return
	}
	if b.lines != nil && time.Since(b.spoken) >= plainEvery {
		b.spoken = time.Now()
		if total > 0 {
			fmt.Fprintf(b.lines, "%s: %s of %s\n", b.name, b.format(n), b.format(total))
		} else {
			fmt.Fprintf(b.lines, "%s: %s\n", b.name, b.format(n))
		}
	}
}

// done takes the bar away.
func (b *bar) done() {
	if b.b != nil {
		b.b.Abort(true)
		b.p.Wait()
	}
}

// counting is a reader or writer that moves a bar.
type counting struct {
	r io.Reader
	w io.Writer
	b *bar
}

func (c counting) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.b.add(int64(n))
	return n, err
}

func (c counting) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.b.add(int64(n))
	return n, err
}
