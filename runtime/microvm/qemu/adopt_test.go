package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// house is a hold of a test's own, and the directory of its machines.
type house struct {
	t      testing.TB
	g      guest
	socket string
	dir    string
	pid    int // of the hold
}

func newHouse(t testing.TB) *house {
	t.Helper()
	g := theGuest(t)
	if os.Geteuid() != 0 {
		t.Skip("a hold needs root: uid is", os.Geteuid())
	}
	h := &house{t: t, g: g, socket: filepath.Join(t.TempDir(), "hold"), dir: g.driver.cfg.Dir}
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	c, err := hold.Ensure(ctxOf(t), hold.Options{Socket: h.socket, Command: hold.SelfCommand(), Forkers: 1, Log: h.socket + ".log"})
	if err != nil {
		t.Fatal(err)
	}
	h.pid = c.Info().PID
	_ = c.Close()
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(h.socket + ".log")
			t.Logf("log of the hold:\n%s", log)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		c, err := hold.Dial(ctx, h.socket)
		if err != nil {
			return // a test ended it
		}
		if err := c.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		_ = c.Close()
	})
	return h
}

// ownerProcess is one that owns a machine.
type ownerProcess struct {
	t   testing.TB
	cmd *exec.Cmd
	out *bufio.Reader
}

func (h *house) child(j ownerJob) *ownerProcess {
	h.t.Helper()
	j.Socket, j.Dir = h.socket, h.dir
	text, err := json.Marshal(j)
	if err != nil {
		h.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "DSEC_TEST_OWNER="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	c := &ownerProcess{t: h.t, cmd: cmd, out: bufio.NewReader(out)}
	h.t.Cleanup(c.kill)
	c.wait("go")
	return c
}

func (c *ownerProcess) wait(word string) {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil || strings.TrimSpace(line) != word {
		c.t.Fatalf("the owner said %q, want %q (%v)", line, word, err)
	}
}

// kill ends the owner as nobody can notice it.
func (c *ownerProcess) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// next is a driver of the next owner.
func (h *house) next() (*Driver, *hold.Client) {
	h.t.Helper()
	c, err := hold.Dial(ctxOf(h.t), h.socket)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = c.Close() })
	d, err := New(ctxOf(h.t), Config{Dir: h.dir, UID: testUID, Keep: &Keep{Hold: c}})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(d.Close)
	return d, c
}

// strangers is a driver of the same directory, with another hold.
func (h *house) strangers() (*Driver, *hold.Client) {
	h.t.Helper()
	other := *h
	other.socket = filepath.Join(h.t.TempDir(), "hold")
	c, err := hold.Ensure(ctxOf(h.t), hold.Options{Socket: other.socket, Command: hold.SelfCommand(), Forkers: 1})
	if err != nil {
		h.t.Fatal(err)
	}
	_ = c.Close()
	h.t.Cleanup(func() {
		if c, err := hold.Dial(context.Background(), other.socket); err == nil {
			_ = c.Shutdown(context.Background())
			_ = c.Close()
		}
	})
	return other.next()
}

// nothing says what is left of machines, which is nothing.
func (h *house) nothing(d *Driver) {
	h.t.Helper()
	c := d.cfg.Keep.Hold
	kept, err := c.Names(ctxOf(h.t), "")
	if err != nil || len(kept) != 0 {
		h.t.Errorf("kept: %v, %v", kept, err)
	}
	plains, err := c.Plains(ctxOf(h.t), "")
	if err != nil || len(plains) != 0 {
		h.t.Errorf("processes: %v, %v", plains, err)
	}
	names, err := os.ReadDir(filepath.Join(h.dir, recordDir))
	if err != nil || len(names) != 0 {
		h.t.Errorf("records: %v, %v", names, err)
	}
	if len(d.users) != 0 {
		h.t.Errorf("users: %v", d.users)
	}
	out, _ := exec.Command("pgrep", "-P", fmt.Sprint(h.pid), "qemu").Output()
	if len(bytes.TrimSpace(out)) != 0 {
		h.t.Errorf("QEMUs: %s", out)
	}
}

func (h *house) adopt(d *Driver, name string) *machine {
	h.t.Helper()
	m, err := d.Adopt(ctxOf(h.t), name)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(m.Kill)
	return m.(*machine)
}

const bootID = "cat /proc/sys/kernel/random/boot_id"

// A machine goes from one owner to the next, each killed, and all of it goes along.
func TestAMachineOutlivesItsOwners(t *testing.T) {
	h := newHouse(t)
	dev := h.g.devices(t, "layer")
	owner := h.child(ownerJob{Do: "boot", Name: "one", Shape: h.g.shape, Devices: dev})
	owner.wait("there") // it boots
	owner.kill()
	owner = h.child(ownerJob{Do: "take", Name: "one"})
	owner.wait("there") // it has booted, and keeps its number
	// Who owns it is alone.
	d, c := h.strangers()
	_, err := d.Adopt(ctxOf(t), "one")
	wantClass(t, err, dsec.Conflict, "living owner")
	_ = c.Close()
	owner.kill()
	d, c = h.next()
	if names, err := d.Names(t.Context()); err != nil || len(names) != 1 || names[0] != "one" {
		t.Fatal(names, err)
	}
	m := h.adopt(d, "one")
	boot := ask(t, m, bootID)
	want(t, m, "get", boot)
	walls(t, m)
	want(t, m, "write /dev/vda 4096 written", "ok")
	want(t, m, "read /dev/pmem0 0", hexOf("layer"))
	if pss, err := m.Memory(); err != nil || pss < 32<<20 {
		t.Errorf("memory %d, %v", pss, err)
	}
	_, err = d.Adopt(ctxOf(t), "one")
	wantClass(t, err, dsec.Conflict, "living owner")
	again := dev
	again.Name, again.Disk = "one", h.g.devices(t, "x").Disk
	_, err = d.Clone(ctxOf(t), h.g.template(t), again)
	wantClass(t, err, dsec.AlreadyExists, "has this name")
	again.Name, again.Disk = "two", dev.Disk
	_, err = d.Clone(ctxOf(t), h.g.template(t), again)
	wantClass(t, err, dsec.Conflict, "another machine has this disk")
	// Its user is taken, also for who has not adopted it.
	other, err := New(t.Context(), Config{Dir: h.dir, UID: testUID, Keep: &Keep{Hold: c}})
	if err != nil || len(other.users) != 1 || !other.users[testUID] {
		t.Errorf("users: %v, %v", other.users, err)
	}
	// What it can, it can still: snapshot, restore, with a name too.
	dir := filepath.Join(t.TempDir(), "s")
	if err := m.Snapshot(ctxOf(t), dir); err != nil {
		t.Fatal(err)
	}
	if err := m.Stop(ctxOf(t)); err != nil || m.Err() != nil {
		t.Error(err, m.Err())
	}
	h.nothing(d)
	_, err = d.Adopt(ctxOf(t), "one")
	wantClass(t, err, dsec.NotFound, "no such file")
	dev.Name = "one"
	restored, err := d.Restore(ctxOf(t), dir, dev)
	if err != nil {
		t.Fatal(err)
	}
	if err := restored.Resume(ctxOf(t)); err != nil {
		t.Error(err)
	}
	want(t, restored, "get", boot)
	restored.Kill()
	h.nothing(d)
}

// Owners that are killed in the middle of something.
func TestOwnersAreKilledAtEveryPoint(t *testing.T) {
	h := newHouse(t)
	tp := h.g.template(t)
	before := openFiles(t)
	defer func() {
		if after := openFiles(t); len(after) > len(before) {
			t.Errorf("%d files are open, %d were: %v", len(after), len(before), after)
		}
	}()
	for _, do := range []string{"run", "pause", "talk", "half", "commands", "snapshot"} {
		for i := range map[string]int{"run": 1, "pause": 1, "talk": 1, "half": 1, "commands": 4, "snapshot": 4}[do] {
			name := fmt.Sprint(do, i)
			snapshots := t.TempDir()
			owner := h.child(ownerJob{Do: do, Name: name, Template: tp, Devices: h.g.devices(t, name), Snapshot: snapshots})
			owner.wait("there")
			switch do {
			case "commands": // any moment
				time.Sleep(time.Duration(3+7*i) * time.Millisecond)
			case "snapshot": // when some of the state is written
				until(t, "a snapshot to begin", func() bool {
					f, _ := filepath.Glob(snapshots + "/.tmp-snapshot-*/state")
					if len(f) == 0 {
						return false
					}
					st, err := os.Stat(f[0])
					return err == nil && st.Size() > int64(i)<<20
				})
			}
			owner.kill()
			d, c := h.next()
			m := h.adopt(d, name)
			status, err := m.status(ctxOf(t))
			t.Logf("%s: the machine is %s, %v", name, status, err)
			if want := map[string]string{"run": "running", "talk": "running", "half": "running", "pause": "paused"}[do]; want != "" && status != want {
				t.Errorf("%s: it is %s, %v", name, status, err)
			}
			if err := m.Resume(ctxOf(t)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if do == "talk" {
				if word, err := readWord(m.Channel()); err != nil || word != "ng" {
					t.Errorf("the rest of a word: %q, %v", word, err)
				}
			}
			want(t, m, "get", name)
			dir := filepath.Join(snapshots, "whole")
			if do == "snapshot" {
				if err := m.Snapshot(ctxOf(t), dir); err != nil {
					t.Errorf("%s: the next snapshot: %v", name, err)
				}
				want(t, m, "get", name)
			}
			if err := m.Stop(ctxOf(t)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			h.nothing(d)
			_ = c.Close()
		}
	}
}

// Owners that are killed while they start or end a machine: the next has it, or is told.
func TestOwnersAreKilledDuringAStartOrAnEnd(t *testing.T) {
	h := newHouse(t)
	tp := h.g.template(t)
	for i, c := range []struct {
		do, stop string
		class    dsec.Class // "": it is adopted
	}{
		{"clone", "qemu.kept.recorded", dsec.SandboxGone},
		{"clone", "qemu.kept.ends", dsec.SandboxGone},
		{"clone", "qemu.kept.started", dsec.SandboxGone},
		{"boot", "qemu.kept.started", ""},
		{"prepare", "none", dsec.SandboxGone},
		{"end", "qemu.kept.dropped", dsec.SandboxGone},
		{"end", "qemu.kept.forgotten", dsec.SandboxGone},
		{"end", "none", dsec.NotFound},
	} {
		name := fmt.Sprint("m", i)
		job := ownerJob{Do: c.do, Name: name, Template: tp, Shape: h.g.shape, Devices: h.g.devices(t, name), Stop: c.stop}
		if c.do == "boot" {
			job.Template.Key = ""
		}
		owner := h.child(job)
		owner.wait("there")
		owner.kill()
		d, client := h.next()
		if uids := len(d.users); (uids == 1) != (c.class != dsec.NotFound) {
			t.Errorf("%v: %d users", c, uids)
		}
		m, err := d.Adopt(ctxOf(t), name)
		if err == nil {
			if err := m.(*machine).settle(ctxOf(t), ready, time.Minute); err != nil {
				t.Error(err)
			}
			m.Kill()
		}
		if c.class != "" || err != nil {
			wantClass(t, err, c.class, "")
		}
		t.Logf("%s, %s: %v", c.do, c.stop, err)
		h.nothing(d)
		_ = client.Close()
	}
}

// The same at any moment.
func TestOwnersAreKilledAtAnyMomentOfAStart(t *testing.T) {
	h := newHouse(t)
	tp := h.g.template(t)
	were := map[string]int{}
	for i := range 10 {
		name := fmt.Sprint("start", i)
		owner := h.child(ownerJob{Do: "clone", Name: name, Template: tp, Devices: h.g.devices(t, name)})
		// The template is read first; from the record on there is something to find.
		until(t, "a record", func() bool { _, err := os.Stat(filepath.Join(h.dir, recordDir, name+recordTail)); return err == nil })
		time.Sleep(time.Duration(i*12) * time.Millisecond)
		owner.kill()
		d, c := h.next()
		m, err := d.Adopt(ctxOf(t), name)
		if err == nil {
			were["adopted"]++
			if err := m.Resume(ctxOf(t)); err != nil {
				t.Error(err)
			}
			want(t, m, "ping", "pong")
			m.Kill()
		} else {
			were["gone"]++
			wantClass(t, err, dsec.SandboxGone, "")
		}
		h.nothing(d)
		_ = c.Close()
	}
	t.Log(were)
}

// A machine that ends while nobody owns it: the next learns how.
func TestAMachineEndsWithoutAnOwner(t *testing.T) {
	h := newHouse(t)
	tp := h.g.template(t)
	for _, how := range []string{"kill", "panic"} {
		owner := h.child(ownerJob{Do: "run", Name: how, Template: tp, Devices: h.g.devices(t, how)})
		owner.wait("there")
		owner.kill()
		d, c := h.next()
		p, err := c.FindPlain(ctxOf(t), keptPrefix+how)
		if err != nil {
			t.Fatal(err)
		}
		text := "signal: killed"
		if how == "kill" {
			p.Kill()
		} else {
			text = "guest-reset"
			f, err := c.Get(ctxOf(t), endName(how, "agent"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteString("panic\n"); err != nil {
				t.Fatal(err)
			}
			_ = f.Close()
		}
		if err := p.Wait(ctxOf(t)); err != nil {
			t.Fatal(err)
		}
		p.Close()
		_, err = d.Adopt(ctxOf(t), how)
		wantClass(t, err, dsec.SandboxGone, text)
		h.nothing(d)
		_, err = d.Adopt(ctxOf(t), how)
		wantClass(t, err, dsec.NotFound, "")
		_ = c.Close()
	}
}

// Who has no time to take over a machine leaves it to the next.
func TestAMachineThatDoesNotAnswer(t *testing.T) {
	h := newHouse(t)
	owner := h.child(ownerJob{Do: "run", Name: "x", Template: h.g.template(t), Devices: h.g.devices(t, "x")})
	owner.wait("there")
	owner.kill()
	d, c := h.next()
	p, err := c.FindPlain(ctxOf(t), keptPrefix+"x")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := unix.Kill(p.Info().PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	before := openFiles(t)
	for range 3 {
		_, err = d.Adopt(limited(t, 200*time.Millisecond), "x")
		wantClass(t, err, dsec.Timeout, "deadline")
	}
	if after := openFiles(t); len(after) > len(before) {
		t.Errorf("%d files are open, %d were: %v", len(after), len(before), after)
	}
	if !d.users[testUID] {
		t.Error("its user was given back")
	}
	if err := unix.Kill(p.Info().PID, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	m := h.adopt(d, "x")
	want(t, m, "get", "x")
	m.Kill()
	h.nothing(d)
}

// Machines end with the hold; the next hold knows nothing of them, and who asks is told.
func TestAMachineEndsWithTheHold(t *testing.T) {
	h := newHouse(t)
	owner := h.child(ownerJob{Do: "run", Name: "x", Template: h.g.template(t), Devices: h.g.devices(t, "x")})
	owner.wait("there")
	owner.kill()
	d, c := h.next()
	m := h.adopt(d, "x")
	if err := unix.Kill(h.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-m.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("it lives")
	}
	wantClass(t, m.Err(), dsec.Unavailable, "the hold is gone")
	_ = c.Close()
	if c, err := hold.Ensure(ctxOf(t), hold.Options{Socket: h.socket, Command: hold.SelfCommand(), Forkers: 1}); err != nil {
		t.Fatal(err)
	} else {
		h.pid = c.Info().PID
		_ = c.Close()
	}
	d, _ = h.next()
	_, err := d.Adopt(ctxOf(t), "x")
	wantClass(t, err, dsec.SandboxGone, "no process")
	h.nothing(d)
}

// The hold is upgraded under a machine, with an owner and without.
func TestAMachineOutlivesAnUpgradeOfTheHold(t *testing.T) {
	h := newHouse(t)
	owner := h.child(ownerJob{Do: "run", Name: "x", Template: h.g.template(t), Devices: h.g.devices(t, "x")})
	owner.wait("there")
	owner.kill()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "hold")
	if err := os.WriteFile(name, append(self, 'x'), 0o755); err != nil {
		t.Fatal(err)
	}
	binary, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = binary.Close() }()
	c, err := hold.Ensure(ctxOf(t), hold.Options{Socket: h.socket, Binary: binary})
	if err != nil || !c.Info().Upgraded {
		t.Fatalf("%+v, %v", c.Info(), err)
	}
	_ = c.Close()
	d, _ := h.next()
	m := h.adopt(d, "x")
	want(t, m, "get", "x")
	m.Kill()
	h.nothing(d)
}

// Starts that are given up, or cannot be, leave nothing, with this owner and the next.
func TestAKeptStartThatFails(t *testing.T) {
	h := newHouse(t)
	tp := h.g.template(t)
	d, c := h.next()
	dev := h.g.devices(t, "x")
	dev.Name = "x"
	if m, err := d.Clone(ctxOf(t), tp, dev); err != nil { // reads the template
		t.Fatal(err)
	} else {
		m.Kill()
	}
	were := map[bool]int{}
	for i := range 12 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i*8)*time.Millisecond)
		m, err := d.Clone(ctx, tp, dev)
		cancel()
		if err == nil {
			m.Kill()
		}
		were[err == nil]++
		until(t, "cancelled starts to be undone", func() bool {
			plains, err := c.Plains(ctxOf(t), "")
			return err == nil && len(plains) == 0
		})
		h.nothing(d)
	}
	t.Log(were)
	var err error
	d.cfg.Keep.Place = func(string) (string, []string) { return "/nothing/there", nil }
	_, err = d.Clone(ctxOf(t), tp, dev)
	wantClass(t, err, dsec.Unavailable, "/nothing/there")
	h.nothing(d)
	d.cfg.Keep.Place, d.cfg.Path = nil, "/nothing/there"
	_, err = d.Clone(ctxOf(t), tp, dev)
	wantClass(t, err, dsec.FileNotFound, "/nothing/there")
	h.nothing(d)
	dev.Name = "../x"
	_, err = d.Clone(ctxOf(t), tp, dev)
	wantClass(t, err, dsec.Invalid, "1 to 60")
}

// A machine whose record is damaged is of no use to anybody; one of a later time is.
func TestDamagedRecords(t *testing.T) {
	h := newHouse(t)
	owner := h.child(ownerJob{Do: "run", Name: "x", Template: h.g.template(t), Devices: h.g.devices(t, "x")})
	owner.wait("there")
	owner.kill()
	path := filepath.Join(h.dir, recordDir, "x"+recordTail)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	change := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	change(strings.Replace(string(good), `"format": 1`, `"format": 2`, 1))
	d, _ := h.next()
	_, err = d.Adopt(ctxOf(t), "x")
	wantClass(t, err, dsec.Unsupported, "format 2")
	if !d.users[testUID] {
		t.Error("another machine could have its user")
	}
	change(string(good[:100]))
	_, err = d.Adopt(ctxOf(t), "x")
	wantClass(t, err, dsec.Corrupt, "record")
	h.nothing(d)
}

func TestNamesAndRecords(t *testing.T) {
	g := theGuest(t)
	dev := g.devices(t, "x")
	dev.Name = "x"
	_, err := g.driver.Start(ctxOf(t), g.shape, dev)
	wantClass(t, err, dsec.Unsupported, "nothing keeps")
	_, err = g.driver.Adopt(ctxOf(t), "x")
	wantClass(t, err, dsec.Unsupported, "nothing keeps")
	for _, name := range []string{"", ".x", "a/b", strings.Repeat("x", 61), "ü", "a\x00"} {
		wantClass(t, vmm.CheckName(name), dsec.Invalid, "1 to 60")
	}
	r := record{Format: recordFormat, Name: "sb-1", UID: testUID + 5, Identity: identity{QEMU: "QEMU emulator version 7.2.22", Accel: tcg, Line: strings.Repeat("0a", 32),
		Kernel: strings.Repeat("1b", 32), Initramfs: strings.Repeat("2c", 32), Append: "quiet", CPUs: 2, Memory: 128 << 20, Pmem: []int64{4 << 20}, Disk: 1 << 20, NIC: true}}
	golden, err := os.ReadFile("testdata/vmrecord-v1.json")
	if err != nil || string(golden) != string(r.encode()) {
		t.Errorf("%v; it is written as\n%s", err, r.encode())
	}
	got, err := parseRecord(golden)
	if err != nil || string(got.encode()) != string(golden) {
		t.Errorf("%+v, %v", got, err)
	}
	for what, change := range map[string][2]string{
		"format":     {`"format": 1`, `"format": 2`},
		"its name":   {`"sb-1"`, `"../x"`},
		"a member":   {`"uid"`, `"gid"`},
		"a digest":   {"2c2c", "2c2g"},
		"its memory": {`"memory": 134217728`, `"memory": 1`},
		"the end":    {"}\n}", "}\n} {}"},
		"all":        {"{", ""},
	} {
		class := dsec.Corrupt
		if what == "format" {
			class = dsec.Unsupported
		}
		_, err := parseRecord([]byte(strings.Replace(string(golden), change[0], change[1], 1)))
		wantClass(t, err, class, "record")
	}
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatal("waited in vain for", what)
		}
		time.Sleep(time.Millisecond)
	}
}
