package user

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// patience is how long a creation may take before it is told what it waits for:
// a person at a terminal wants to know soon, a log wants it only if it matters.
var patience = struct{ terminal, log time.Duration }{time.Second, 5 * time.Second}

// waiting tells on stderr what a creation waits for.
type waiting struct {
	w        io.Writer
	terminal bool
	images   []dsec.LayerRef

	mu     sync.Mutex
	last   string    // what was heard
	spoken time.Time // when something was said
}

// await begins to tell, after a moment, how far the images of a spec are. The
// creation is over when done is called, which waits for what is at work.
func await(ctx context.Context, c *cobra.Command, cl *client.Client, spec dsec.Spec) (done func()) {
	if j, _ := asJSON(c); j {
		return func() {}
	}
	f, file := c.ErrOrStderr().(*os.File)
	w := &waiting{w: c.ErrOrStderr(), terminal: file && term.IsTerminal(int(f.Fd())), images: append([]dsec.LayerRef{spec.Image}, spec.Layers...)}
	after := patience.log
	if w.terminal {
		after = patience.terminal
	}
	begun := time.Now()
	on, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-on.Done():
		case <-time.After(after):
			w.follow(on, cl, begun)
		}
	}()
	return func() {
		cancel()
		<-ended
		w.end(ctx.Err() != nil)
	}
}

// follow says what is heard of the images until ctx ends.
func (w *waiting) follow(ctx context.Context, cl *client.Client, begun time.Time) {
	w.hear(fmt.Sprintf("waiting for a sandbox of %s; dsec events shows how far it is", w.images[0]))
	s, err := cl.OpenSession(ctx, &client.Events{Types: []dsec.EventType{dsec.EventNote}, Since: begun}, w.event)
	if err != nil {
		return // a help only: the creation says what is wrong
	}
	defer s.Close()
	<-ctx.Done()
}

// event hears what is said of the images, whichever sandbox waits for them.
func (w *waiting) event(e dsec.Event) {
	for _, ref := range w.images {
		if strings.HasPrefix(e.Detail, "image "+string(ref)+": ") {
			w.hear("pulling " + strings.TrimPrefix(e.Detail, "image "))
			return
		}
	}
}

// hear says it: on a terminal over what was said before, else now and then.
func (w *waiting) hear(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	first := w.last == "" || strings.HasPrefix(w.last, "waiting")
	w.last = safe(text)
	switch {
	case w.terminal:
		fmt.Fprintf(w.w, "\r\x1b[Kdsec: %s", w.last)
	case first || time.Since(w.spoken) >= plainEvery:
		w.spoken = time.Now()
		fmt.Fprintln(w.w, "dsec:", w.last)
	}
}

// end takes the line away, or leaves the last thing known to who gave up.
func (w *waiting) end(givenUp bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.last != "" && w.terminal {
		fmt.Fprint(w.w, "\r\x1b[K")
	}
	if w.last != "" && givenUp {
		fmt.Fprintln(w.w, "dsec: last heard:", w.last)
	}
}
