package hold

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/process"
)

// TestUpgradesLoseNoOutput follows a command that writes faster than it is
// read, and comes back after each upgrade where it was.
func TestUpgradesLoseNoOutput(t *testing.T) {
	b := newBed(t)
	x := b.box()
	last, upgrades := 1500000, 6
	if testing.Short() {
		last, upgrades = 500000, 3
	}
	s := x.spec("seq", "1", strconv.Itoa(last))
	s.Spec.Head, s.Spec.Tail = 4<<10, 64<<10
	p := x.start(s)
	size := 0
	for i, digits := 1, 1; i <= last; i, digits = i*10, digits+1 {
		size += (min(i*10, last+1) - i) * (digits + 1)
	}
	var pos int64
	next, line := 1, []byte(nil)
	for i := range upgrades + 1 {
		r, err := p.Follow(ctx(t), process.Stdout, pos)
		must(t, err)
		until := int64(size * (i + 1) / (upgrades + 1))
		for pos < until {
			c, err := r.Next(ctx(t))
			must(t, err)
			if c.Offset != pos {
				t.Fatalf("jumped from %d to %d after %d upgrades", pos, c.Offset, i)
			}
			pos += int64(len(c.Data))
			for _, ch := range c.Data {
				if ch != '\n' {
					line = append(line, ch)
					continue
				}
				if string(line) != strconv.Itoa(next) {
					t.Fatalf("%q instead of %d after %d upgrades", line, next, i)
				}
				next, line = next+1, line[:0]
			}
		}
		if i < upgrades {
			b.upgrade([]byte{markPlain, markOther}[i%2])
			p = b.find(x, s.Spec.ID)
		}
		must(t, r.Close())
	}
	res, err := p.Wait(ctx(t))
	must(t, err)
	if next != last+1 || pos != int64(size) || res.Stdout.Total != pos || res.Stdout.Dropped != 0 {
		t.Fatalf("%d lines, %d bytes, want %d: %+v", next-1, pos, size, res)
	}
}

// shared is the present client of a hold that is upgraded all the time.
type shared struct {
	mu  sync.Mutex
	c   *Client
	new chan struct{} // closed when there is another
}

func (s *shared) get() (*Client, chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.c, s.new
}

func (s *shared) set(c *Client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.c = c
	close(s.new)
	s.new = make(chan struct{})
}

// do repeats f with the next client while the hold hangs up.
func (s *shared) do(f func(c *Client) error) error {
	for {
		c, next := s.get()
		err := f(c)
		if dsec.ClassOf(err) != dsec.Unavailable {
			return err
		}
		select {
		case <-next:
		case <-time.After(30 * time.Second):
			return fmt.Errorf("no other hold came: %w", err)
		}
	}
}

// life is one sandbox with one command, which must say what it is told.
func (b *bed) life(s *shared, root *os.File, id string) error {
	x := &box{b: b, id: id, group: filepath.Join(b.group, id), spool: b.dir}
	c := context.Background()
	if err := os.Mkdir(x.group, 0o755); err != nil {
		return err
	}
	err := s.do(func(cl *Client) error {
		if err := cl.RemoveSandbox(c, id); err != nil { // of a spawn whose answer was lost
			return err
		}
		sh, err := cl.Spawn(c, SpawnSpec{ID: id, UIDBase: testBase, GIDBase: testBase, Count: testCount, Cgroup: x.group})
		if err != nil {
			return err
		}
		_, _ = sh.UserNS.Close(), sh.NetNS.Close()
		return cl.Enter(c, EnterSpec{ID: id, Root: root})
	})
	if err != nil {
		return fmt.Errorf("make: %w", err)
	}
	spec := x.sh("echo " + id)
	spec.Spec.ID = id
	err = s.do(func(cl *Client) error {
		p, err := cl.Exec(c, spec)
		if err != nil {
			return err
		}
		res, err := p.Wait(c)
		if err != nil {
			return err
		}
		head, _, _, err := p.Kept(c, process.Stdout)
		if err == nil && (string(head) != id+"\n" || res.ExitCode != 0) {
			return fmt.Errorf("%q: %+v", head, res)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	if err := s.do(func(cl *Client) error { return cl.RemoveSandbox(c, id) }); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return os.Remove(x.group)
}

func TestUpgradeUnderLoad(t *testing.T) {
	b := newBed(t)
	n := 20
	if testing.Short() {
		n = 6
	}
	s := &shared{c: b.c, new: make(chan struct{})}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var lives [3]int
	for w := range lives {
		roots := make(chan *os.File)
		wg.Go(func() {
			for r := range roots {
				if err := b.life(s, r, fmt.Sprintf("w%d-%d", w, lives[w])); err != nil {
					t.Error(err)
					return
				}
				lives[w]++
			}
		})
		r := root(t, testBase)
		wg.Go(func() {
			defer close(roots)
			for {
				clone, err := linux.Clone(r, false)
				if err != nil {
					t.Error(err)
					return
				}
				select {
				case roots <- clone:
				case <-stop:
					return
				}
			}
		})
	}
	bins := []*os.File{marked(t, markPlain), marked(t, markOther)}
	for i := range n {
		c, _ := s.get()
		if err := c.upgrade(ctx(t), bins[i%2]); err != nil {
			t.Error(i, err)
			break
		}
		next, err := Dial(ctx(t), b.o.Socket)
		if err != nil {
			t.Error(i, err)
			break
		}
		s.set(next)
		b.c = next
		_ = c.Close()
	}
	close(stop)
	wg.Wait()
	t.Log("sandboxes made:", lives)
	if l, err := b.c.List(ctx(t)); err != nil || len(l) != 0 {
		t.Fatal(l, err)
	}
}

var goroutines = regexp.MustCompile(`goroutines=(\d+)`)

// TestUpgradesLeaveNothing: descriptors and goroutines are as many after twenty
// upgrades, and after twenty that failed, as after two.
func TestUpgradesLeaveNothing(t *testing.T) {
	b := newBed(t)
	x := b.box()
	pty, in := x.spec("cat"), x.spec("cat")
	pty.Spec.PTY, in.Spec.Stdin = &process.Size{Rows: 1, Cols: 1}, true
	x.start(pty)
	x.start(in)
	x.run(x.sh("setsid sleep 1000 & exit 0"))
	b.spawn(nil)
	count := func() (fds, gos int) {
		d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.c.Info().PID))
		must(t, err)
		log, err := os.ReadFile(b.o.Log)
		must(t, err)
		all := goroutines.FindAllStringSubmatch(string(log), -1)
		gos, err = strconv.Atoi(all[len(all)-1][1])
		must(t, err)
		return len(d), gos
	}
	no, err := os.Open("/bin/false")
	must(t, err)
	defer func() { _ = no.Close() }()
	n := 20
	if testing.Short() {
		n = 5
	}
	bins := []*os.File{marked(t, markPlain), marked(t, markOther)}
	for _, fails := range []bool{false, true} {
		var fds, gos int
		for i := range n {
			if fails {
				if info := b.ensure(no); info.Stale == nil {
					t.Fatalf("%+v", info)
				}
			} else if info := b.ensure(bins[i%2]); !info.Upgraded {
				t.Fatalf("%+v", info)
			}
			if i == 1 {
				fds, gos = count()
			}
		}
		poll(t, "descriptors to be as many as before", func() bool { f, _ := count(); return f <= fds })
		if _, g := count(); g > gos+2 {
			log, _ := os.ReadFile(b.o.Log)
			t.Fatalf("%d goroutines, were %d:\n%s", g, gos, strings.TrimSpace(string(log)))
		}
	}
}
