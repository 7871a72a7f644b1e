package microvm

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

const manyForks = 8

// Copies of one moment have the processes, memory and disk of their source, and are told apart by
// everything that has to differ: random numbers, names, the hardware address, and their clock is right.
func TestForksAreDifferent(t *testing.T) {
	w := newWorld(t, linked)
	open := func(r *runtime.Request) { r.Spec.Network = dsec.NetworkOpen }
	source := request(open)
	_, err := w.r.Create(t.Context(), source)
	must(t, err)
	id := source.ID
	w.run(t, id, "echo kept > /root/disk; mkdir /root/go")
	// One that was started before, and draws when it is told to.
	_, err = w.r.Exec(t.Context(), id, process.Spec{ID: "drawer", Argv: []string{"/bin/sh", "-c",
		"n=0; while ! test -e /root/go/now; do n=$((n+1)); sleep 0.05; done; head -c 16 /dev/urandom | od -An -tx1; echo $n; sleep 600"}})
	must(t, err)
	must(t, w.r.KeepMoment(t.Context(), id, "m1"))
	forks := w.forks(t, "m1", open)
	if o := w.run(t, id, "cat /root/disk"); o.Stdout != "kept\n" {
		t.Errorf("the source: %+v", o)
	}
	must(t, w.r.DropMoment(t.Context(), "m1"))
	seen := map[string]map[string]bool{}
	note := func(what, value string, id dsec.SandboxID) {
		if seen[what] == nil {
			seen[what] = map[string]bool{}
		}
		if value == "" || seen[what][value] {
			t.Errorf("%s: %s %q is empty, or another's", id, what, value)
		}
		seen[what][value] = true
	}
	for _, id := range append(forks, id) {
		before := time.Now()
		o := w.run(t, id, `date +%s; hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1; cat /sys/class/net/eth0/address /etc/hostname; cat /root/disk; grep -c . /etc/hosts`)
		lines := strings.Split(strings.TrimSpace(o.Stdout), "\n")
		if o.ExitCode != 0 || len(lines) != 9 {
			t.Fatalf("%s: %+v", id, o)
		}
		at, _ := strconv.ParseInt(lines[0], 10, 64)
		if d := time.Unix(at, 0).Sub(before); d < -1500*time.Millisecond || d > 2*time.Second { // whole seconds, and the time it takes
			t.Errorf("%s: its clock is %v off", id, d)
		}
		for i, what := range map[int]string{1: "host name", 2: "machine id", 3: "uuid", 4: "random bytes", 5: "MAC"} {
			note(what, lines[i], id)
		}
		if lines[1] != string(id) || lines[6] != string(id) || lines[7] != "kept" {
			t.Errorf("%s: %q", id, lines)
		}
	}
	for _, id := range append(forks, id) {
		p, err := w.r.Process(t.Context(), id, "drawer")
		must(t, err)
		w.run(t, id, "touch /root/go/now")
		eventually(t, "it has drawn", func() bool {
			head, _, _, err := p.Kept(t.Context(), process.Stdout)
			return err == nil && strings.Count(string(head), "\n") == 2
		})
		head, _, _, err := p.Kept(t.Context(), process.Stdout)
		must(t, err)
		note("bytes of a program that ran before", strings.Split(string(head), "\n")[0], id)
	}
}

// drawsWhenCopied is a Python that waits, without a pause, until the machine has another name, and draws at once: what it
// imported, and the state of its generators, are of before the copy.
const drawsWhenCopied = `import os, uuid, time
was = os.uname().nodename
uuid.uuid4()
print("waits", flush=True)
while os.uname().nodename == was: pass
print(uuid.uuid4(), os.urandom(16).hex(), time.time(), os.uname().nodename, flush=True)
time.sleep(600)`

// A Python that was started before draws numbers of its own in each copy, as its first deed there, and has the right time.
func TestPythonOfBeforeDrawsAnew(t *testing.T) {
	w := newWorld(t)
	python := layertest.New(t, layertest.Python)
	with := func(r *runtime.Request) { r.Layers.Layers = append(slices.Clone(r.Layers.Layers), python) }
	id := w.create(t, with)
	said := func(id dsec.SandboxID, lines int) (all []string) {
		p, err := w.r.Process(t.Context(), id, "python")
		must(t, err)
		eventually(t, "it says so", func() bool {
			head, _, _, err := p.Kept(t.Context(), process.Stdout)
			must(t, err)
			all = strings.Split(strings.TrimSuffix(string(head), "\n"), "\n")
			return len(all) >= lines && all[0] != ""
		})
		return all
	}
	_, err := w.r.Exec(t.Context(), id, process.Spec{ID: "python", Argv: []string{"/usr/bin/python3", "-c", drawsWhenCopied}})
	must(t, err)
	said(id, 1)
	must(t, w.r.KeepMoment(t.Context(), id, "m"))
	before := time.Now()
	forks := w.forks(t, "m", with)
	must(t, w.r.DropMoment(t.Context(), "m"))
	drawn := map[string]dsec.SandboxID{}
	for _, fork := range forks {
		all := said(fork, 2)
		words := strings.Fields(all[1])
		if len(all) != 2 || all[0] != "waits" || len(words) != 4 || words[3] != string(fork) {
			t.Fatalf("%s: %q", fork, all)
		}
		for _, number := range words[:2] {
			if other, ok := drawn[number]; ok {
				t.Errorf("%s drew %s, as %s did", fork, number, other)
			}
			drawn[number] = fork
		}
		at, err := strconv.ParseFloat(words[2], 64)
		must(t, err)
		if d := time.UnixMicro(int64(at * 1e6)); d.Before(before.Add(-500*time.Millisecond)) || d.After(time.Now().Add(500*time.Millisecond)) {
			t.Errorf("%s: it was %v when it drew, and the copies were made after %v", fork, d, before)
		}
	}
	if all := said(id, 1); len(all) != 1 {
		t.Errorf("the source: %q", all)
	}
}

// forks makes copies of a moment at once.
func (w *world) forks(t *testing.T, name string, f ...func(*runtime.Request)) []dsec.SandboxID {
	t.Helper()
	var wg sync.WaitGroup
	ids, errs := make([]dsec.SandboxID, manyForks), make([]error, manyForks)
	for i := range manyForks {
		wg.Go(func() {
			r := request(f...)
			r.From = name
			ids[i] = r.ID
			_, errs[i] = w.r.Create(context.Background(), r)
		})
	}
	wg.Wait()
	for _, err := range errs {
		must(t, err)
	}
	return ids
}

// Commands may be started at once after a machine goes on: none is lost.
func TestCommandsRightAfterTheFork(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	must(t, w.r.KeepMoment(t.Context(), id, "m"))
	r := request()
	r.From = "m"
	_, err := w.r.Create(t.Context(), r)
	must(t, err)
	must(t, w.r.DropMoment(t.Context(), "m"))
	var wg sync.WaitGroup
	errs := make(chan error, 100)
	for i := range 100 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			p, err := w.r.Exec(ctx, r.ID, process.Spec{Argv: []string{"/bin/echo", strconv.Itoa(i)}})
			if err == nil {
				_, err = p.Wait(ctx)
			}
			var out []byte
			if err == nil {
				out, _, _, err = p.Kept(ctx, process.Stdout)
			}
			if err == nil && string(out) != strconv.Itoa(i)+"\n" {
				err = fmt.Errorf("echo %d said %q", i, out)
			}
			if err != nil {
				errs <- err
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A suspended sandbox has nothing in memory and nothing that runs; it goes on with its processes, the right
// time and another address, also under an agent that has not suspended it. Who reads of a command meanwhile
// waits, or has it brought back.
func TestSuspendedSandboxGoesOn(t *testing.T) {
	w := newWorld(t, linked)
	id := w.create(t, func(r *runtime.Request) { r.Spec.Network = dsec.NetworkOpen })
	p, err := w.r.Exec(t.Context(), id, process.Spec{ID: "counter", Argv: []string{"/bin/sh", "-c", "n=0; while n=$((n+1)); do echo $n; sleep 0.1; done"}})
	must(t, err)
	rd, err := p.Follow(t.Context(), process.Stdout, 0)
	must(t, err)
	defer func() { _ = rd.Close() }()
	next := func() string {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		c, err := rd.Next(ctx)
		must(t, err)
		return string(c.Data)
	}
	before := next()
	w.run(t, id, "echo kept > /f")
	for range 2 {
		must(t, w.r.Suspend(t.Context(), id))
	}
	if names, err := w.driver.Names(t.Context()); err != nil || len(names) > 0 {
		t.Fatal(names, err)
	}
	list, err := w.r.List(t.Context())
	if err != nil || len(list) != 1 || !list[0].Running || !list[0].Paused || len(list[0].Execs) != 1 {
		t.Fatalf("%+v %v", list, err)
	}
	if s, err := w.r.Stats(t.Context(), id); err != nil || s.HostMemory != 0 || s.CPU <= 0 {
		t.Errorf("%+v %v", s, err)
	}
	w.reopen(t)
	p, err = w.r.Process(t.Context(), id, "counter") // brings it back, frozen
	must(t, err)
	total := func() int64 {
		head, tail, off, err := p.Kept(t.Context(), process.Stdout)
		must(t, err)
		return off + int64(len(head)+len(tail))
	}
	was := total()
	if _, err := w.r.Exec(t.Context(), id, runtimetest.Shell("true")); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("a command in a paused sandbox: %v", err)
	}
	if total() != was {
		t.Error("it ran though it is paused")
	}
	must(t, w.r.Resume(t.Context(), id))
	eventually(t, "it goes on", func() bool { return total() > was })
	now := time.Now()
	o := w.run(t, id, "date +%s; cat /f; ip -4 addr show eth0 | grep -c inet")
	var at int64
	var f string
	var n int
	if _, err := fmt.Sscan(o.Stdout, &at, &f, &n); err != nil || f != "kept" || n != 1 || now.Sub(time.Unix(at, 0)).Abs() > 2*time.Second {
		t.Errorf("%+v %v", o, err)
	}
	if before == "" {
		t.Error("nothing was read before")
	}
	// In one agent, a reader that waits goes on where it was.
	rd2, err := p.Follow(t.Context(), process.Stdout, total())
	must(t, err)
	rd = rd2
	next()
	must(t, w.r.Suspend(t.Context(), id))
	got := make(chan string, 1)
	go func() {
		c, err := rd2.Next(context.Background())
		if err != nil {
			got <- err.Error()
			return
		}
		got <- string(c.Data)
	}()
	must(t, w.r.Resume(t.Context(), id))
	select {
	case text := <-got:
		if text == "" || strings.ContainsAny(text, "abcdefgh") {
			t.Errorf("read %q", text)
		}
	case <-time.After(20 * time.Second):
		t.Error("the reader hangs")
	}
	must(t, w.r.Suspend(t.Context(), id))
	must(t, w.r.Stop(t.Context(), id, 0))
	if _, err := w.r.Start(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if o := w.run(t, id, "cat /f"); o.Stdout != "kept\n" {
		t.Errorf("%+v", o)
	}
	must(t, w.r.Suspend(t.Context(), id))
}
