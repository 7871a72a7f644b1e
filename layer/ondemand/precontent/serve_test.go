package precontent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer/ondemand/journal"
)

func TestMain(m *testing.M) {
	if os.Getenv("DSEC_PRECONTENT_TAKER") != "" {
		takeForTest()
		return
	}
	os.Exit(m.Run())
}

const block = 4096

// filler fills what is asked for with bytes that follow from the place.
type filler struct {
	data *os.File
	mu   sync.Mutex
	asks int
	away bool
}

func (f *filler) Ensure(_ context.Context, off, n int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asks++
	if f.away {
		return errors.New("away")
	}
	_, err := f.data.WriteAt(want(off, int(n)), off)
	return err
}

func want(off int64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte((off+int64(i))/block) + 1
	}
	return b
}

// marked is a sparse file that is marked, and the group and journal.
func marked(t *testing.T) (group, events, data *os.File) {
	t.Helper()
	if err := Supported(t.TempDir()); err != nil {
		t.Skip(err)
	}
	group, err := NewGroup()
	if err != nil {
		t.Fatal(err)
	}
	events, err = NewJournal()
	if err != nil {
		t.Fatal(err)
	}
	data, err = os.OpenFile(filepath.Join(t.TempDir(), "data"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(data.Truncate(1<<20), Mark(group, data)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		group.Close()
		events.Close()
		data.Close()
	})
	return group, events, data
}

// serving runs Serve until the test ends or stop is called.
func serving(t *testing.T, group, events *os.File, find func(dev, ino uint64) Source) (stop func()) {
	t.Helper()
	return servingAnd(t, group, events, find, func(_ context.Context, dev, ino uint64, err error) { t.Logf("refused: %d, %d: %v", dev, ino, err) })
}

func servingAnd(t *testing.T, group, events *os.File, find func(dev, ino uint64) Source,
	refused func(context.Context, uint64, uint64, error)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, group, events, find, refused) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

const refused = "Input/output error" // as dd says it

// reader is a process that reads a block; the answer is what it got.
func reader(t *testing.T, path string, i int) <-chan error {
	t.Helper()
	var out, said bytes.Buffer
	c := exec.Command("dd", "if="+path, "bs=4096", "count=1", fmt.Sprintf("skip=%d", i), "status=none")
	c.Env, c.Stdout, c.Stderr = append(os.Environ(), "LC_ALL=C"), &out, &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(time.Minute, func() { _ = c.Process.Kill() })
	done := make(chan error, 1)
	go func() {
		defer kill.Stop()
		err := c.Wait()
		switch {
		case err != nil:
			err = fmt.Errorf("%w: %s", err, said.String())
		case !bytes.Equal(out.Bytes(), want(int64(i)*block, block)):
			err = fmt.Errorf("block %d: %d wrong bytes", i, out.Len())
		}
		done <- err
	}()
	return done
}

func TestReadsWaitAndAreRefused(t *testing.T) {
	group, events, data := marked(t)
	src := &filler{data: data}
	dev, ino, err := ID(data)
	if err != nil {
		t.Fatal(err)
	}
	stop := serving(t, group, events, func(d, i uint64) Source {
		if d == dev && i == ino {
			return src
		}
		return nil
	})
	if err := <-reader(t, data.Name(), 3); err != nil {
		t.Error(err)
	}
	src.mu.Lock()
	src.away = true
	src.mu.Unlock()
	if err := <-reader(t, data.Name(), 5); err == nil || !strings.Contains(err.Error(), refused) {
		t.Errorf("a source that is away: %v", err)
	}
	// Nobody asks about a file that is unmarked.
	if err := Unmark(group, data); err != nil {
		t.Fatal(err)
	}
	if err := <-reader(t, data.Name(), 3); err != nil {
		t.Error(err)
	}
	if err := Unmark(group, data); err != nil {
		t.Errorf("again: %v", err)
	}
	stop()
	// A session that ended can be followed by one of the same process.
	if err := Mark(group, data); err != nil {
		t.Fatal(err)
	}
	src.away = false
	waits := reader(t, data.Name(), 7)
	serving(t, group, events, func(uint64, uint64) Source { return src })
	if err := <-waits; err != nil {
		t.Error(err)
	}
}

// TestSessionsThatEndLeaveWhatWaits to the next, ten times over.
func TestSessionsThatEndLeaveWhatWaits(t *testing.T) {
	group, events, data := marked(t)
	var waits []<-chan error
	for i := range 24 {
		waits = append(waits, reader(t, data.Name(), i))
	}
	for range 10 {
		src := &reluctant{filler{data: data}}
		stop := serving(t, group, events, func(uint64, uint64) Source { return src })
		time.Sleep(time.Millisecond)
		stop()
	}
	serving(t, group, events, func(uint64, uint64) Source { return &filler{data: data} })
	for _, w := range waits {
		if err := <-w; err != nil {
			t.Error(err)
		}
	}
}

// reluctant has some blocks at once and the others never.
type reluctant struct{ filler }

func (r *reluctant) Ensure(ctx context.Context, off, n int64) error {
	if off/block%4 == 0 {
		return r.filler.Ensure(ctx, off, n)
	}
	<-ctx.Done()
	return ctx.Err()
}

// refusals collects what Serve says it refused, and takes a moment for it.
type refusals struct {
	mu  sync.Mutex
	all []error
	ids [][2]uint64
}

func (r *refusals) note(_ context.Context, dev, ino uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all, r.ids = append(r.all, err), append(r.ids, [2]uint64{dev, ino})
}

// TestFilesOfNobodyAreRefused: no source, no bytes, and it is told before the reader
// is.
func TestFilesOfNobodyAreRefused(t *testing.T) {
	group, events, data := marked(t)
	dev, ino, err := ID(data)
	if err != nil {
		t.Fatal(err)
	}
	var r refusals
	servingAnd(t, group, events, func(uint64, uint64) Source { return nil }, r.note)
	if err := <-reader(t, data.Name(), 1); err == nil || !strings.Contains(err.Error(), refused) {
		t.Errorf("read: %v", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.all) == 0 || r.ids[0] != [2]uint64{dev, ino} || !errors.Is(r.all[0], errNobody) {
		t.Errorf("told of %v, %v", r.ids, r.all)
	}
}

// TestWhatCannotBeUnderstoodIsRefusedAndTold, and what is left of whose file nothing
// is known and not all have the bytes: it may have been of any.
func TestWhatCannotBeUnderstoodIsRefusedAndTold(t *testing.T) {
	events, err := NewJournal()
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	group, err := os.OpenFile(os.DevNull, os.O_RDWR, 0) // takes every answer
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	j, err := journal.Open(context.Background(), events, shape)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	var r refusals
	s := &session{group: group, j: j, refused: r.note, idle: make(chan int, shape.Slots), fail: func(error) {},
		find: func(uint64, uint64) Source { return All{&filler{away: true}} }}
	le.PutUint32(j.Take(0), 7) // no event is so short
	le.PutUint32(j.Slot(0)[16:], 1<<20)
	b := j.Take(1)
	le.PutUint32(b, headerSize+rangeSize)
	b[4] = unix.FANOTIFY_METADATA_VERSION
	le.PutUint16(b[6:], headerSize)
	le.PutUint32(b[16:], 1<<20)
	b[headerSize] = unix.FAN_EVENT_INFO_TYPE_RANGE
	le.PutUint16(b[headerSize+2:], rangeSize)
	le.PutUint64(b[headerSize+16:], 4096)
	if used := s.resume(context.Background()); len(used) != 2 {
		t.Errorf("used: %v", used)
	}
	s.busy.Wait()
	if len(r.all) != 2 || r.ids[0] != [2]uint64{} || r.ids[1] != [2]uint64{} || len(s.idle) != 2 || len(j.Left()) != 0 {
		t.Errorf("told of %v, %v; %d idle, left: %v", r.ids, r.all, len(s.idle), j.Left())
	}
}

// TestAReadForWhichThereWasNoDescriptorIsTold: the kernel has refused it.
func TestAReadForWhichThereWasNoDescriptorIsTold(t *testing.T) {
	group, events, data := marked(t)
	told := make(chan error, 16)
	servingAnd(t, group, events, func(uint64, uint64) Source { return &filler{data: data} }, func(_ context.Context, dev, ino uint64, err error) {
		if dev == 0 && ino == 0 {
			told <- err
		}
	})
	c := exec.Command("sh", "-c", "read go; exec dd if="+data.Name()+" bs=4096 count=1 of=/dev/null status=none")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if err := <-reader(t, data.Name(), 9); err != nil { // it is served
		t.Fatal(err)
	}
	free, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	none := unix.Rlimit{Cur: uint64(free.Fd()), Max: was.Max}
	if err := errors.Join(free.Close(), unix.Setrlimit(unix.RLIMIT_NOFILE, &none)); err != nil {
		t.Fatal(err)
	}
	_, err = in.Write([]byte("\n"))
	var why error
	select {
	case why = <-told:
	case <-time.After(20 * time.Second):
	}
	if err := errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil || !errors.Is(why, unix.EMFILE) {
		t.Errorf("read: %v, told of %v", err, why)
	}
}

// TestOwnWritesDoNotWait: also through a descriptor that raises events.
func TestOwnWritesDoNotWait(t *testing.T) {
	group, events, data := marked(t)
	late, err := os.OpenFile(data.Name(), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	src := &filler{data: late}
	serving(t, group, events, func(uint64, uint64) Source { return src })
	for i := range 20 {
		if err := <-reader(t, data.Name(), i); err != nil {
			t.Error(err)
		}
	}
}

// TestAnOlderDescriptorRaisesNothing, which is what a server writes through: one
// that was opened before the mark, also where other files are marked.
func TestAnOlderDescriptorRaisesNothing(t *testing.T) {
	group, _, first := marked(t)
	data, err := os.OpenFile(filepath.Join(filepath.Dir(first.Name()), "other"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	if err := errors.Join(data.Truncate(1<<20), Mark(group, data), group.SetReadDeadline(time.Now().Add(time.Minute))); err != nil {
		t.Fatal(err)
	}
	if _, err := data.WriteAt(want(0, block), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := data.ReadAt(make([]byte, block), 0); err != nil {
		t.Fatal(err)
	}
	// The first event is that of another reader.
	r := reader(t, data.Name(), 0)
	b := make([]byte, shape.Size)
	if _, err := group.Read(b[:eventRoom]); err != nil {
		t.Fatal(err)
	}
	e, err := parse(b)
	if err != nil || e.pid == int32(os.Getpid()) {
		t.Errorf("%+v, %v", e, err)
	}
	if _, err := group.Write(answer(e.fd, allow)); err != nil {
		t.Fatal(err)
	}
	group.Close() // dd may ask again
	if err := errors.Join(unix.Close(int(e.fd)), <-r); err != nil {
		t.Error(err)
	}
}

// takeForTest is a server that takes events and is killed before it answers: of
// every other it has noted the file.
func takeForTest() {
	group, events := os.NewFile(3, "group"), os.NewFile(4, "journal")
	j, err := journal.Open(context.Background(), events, shape)
	if err != nil {
		panic(err)
	}
	if err := journal.Pollable(group); err != nil {
		panic(err)
	}
	for i := 0; ; i++ {
		if _, err := group.Read(j.Take(i)[:eventRoom]); err != nil {
			panic(err)
		}
		if e, err := parse(j.Slot(i)); err == nil && i%2 == 0 {
			var st unix.Stat_t
			if unix.Fstat(int(e.fd), &st) == nil {
				note(j.Slot(i), st.Dev, st.Ino)
			}
		}
		fmt.Println(i)
	}
}

// TestWhatAKilledServerTookIsAnswered, whatever is open by the numbers that its
// events are known by.
func TestWhatAKilledServerTookIsAnswered(t *testing.T) {
	const readers = 12
	group, events, data := marked(t)
	taker := exec.Command("/proc/self/exe")
	taker.Env = append(os.Environ(), "DSEC_PRECONTENT_TAKER=1")
	taker.ExtraFiles, taker.Stderr = []*os.File{group, events}, os.Stderr
	out, err := taker.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := taker.Start(); err != nil {
		t.Fatal(err)
	}
	var waits []<-chan error
	for i := range readers {
		waits = append(waits, reader(t, data.Name(), 2*i))
	}
	for range readers {
		var n int
		if _, err := fmt.Fscan(out, &n); err != nil {
			t.Fatal(err)
		}
	}
	ended, end := context.WithCancel(context.Background())
	end()
	if _, err := journal.Open(ended, events, shape); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("a journal that another process has: %v", err)
	}
	_ = taker.Process.Kill()
	_ = taker.Wait() // killed
	occupy(t, events)
	src := &filler{data: data}
	dev, ino, err := ID(data)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	unknown := 0
	serving(t, group, events, func(d, i uint64) Source {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case d == 0 && i == 0:
			unknown++
			return All{src, &filler{data: data}}
		case d == dev && i == ino:
			return src
		}
		return nil
	})
	for i := range readers {
		waits = append(waits, reader(t, data.Name(), 2*i+1))
	}
	for _, w := range waits {
		if err := <-w; err != nil {
			t.Error(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if unknown != readers/2 {
		t.Errorf("%d events of an unknown file, want %d", unknown, readers/2)
	}
}

// occupy opens something by some of the numbers that events are left under.
func occupy(t *testing.T, events *os.File) {
	t.Helper()
	j, err := journal.Open(context.Background(), events, shape)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	left := j.Left()
	if len(left) == 0 {
		t.Fatal("nothing is left")
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, i := range left {
		e, err := parse(j.Slot(i))
		if err != nil {
			t.Fatal(err)
		}
		if rand.IntN(3) == 0 {
			fd, err := unix.FcntlInt(null.Fd(), unix.F_DUPFD_CLOEXEC, int(e.fd))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Close(fd) })
		}
	}
}
