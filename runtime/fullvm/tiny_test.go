package fullvm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// echo is a boot sector: it says R on the serial port, and what is typed on the screen and there.
var echo = []byte{
	0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, // segments and stack
	0xba, 0xf8, 0x03, 0xb0, 'R', 0xee, // out 0x3f8, 'R'
	0x30, 0xe4, 0xcd, 0x16, // wait for a key
	0xb4, 0x0e, 0xbb, 0x07, 0x00, 0xcd, 0x10, // write it on the screen
	0xba, 0xf8, 0x03, 0xee, // and to the port
	0xeb, 0xef,
}

// tiny is the layer of a disk that boots at once and has no agent.
func tiny(t testing.TB, change ...func(*diskimage.Manifest)) layer.Local {
	t.Helper()
	disk := make([]byte, 1<<20)
	copy(disk, echo)
	disk[510], disk[511] = 0x55, 0xaa
	m := diskimage.New(int64(len(disk)))
	for _, f := range change {
		f(&m)
	}
	return buildLayer(t, t.TempDir(), m, diskimage.Source{Size: int64(len(disk)), Reader: bytes.NewReader(disk)})
}

func small(r *runtime.Request) { r.Spec.Limits.Memory, r.Spec.Limits.Disk = 64<<20, 64<<20 }

// says waits for the end of what the machine says on its port.
func (b *box) says(want string) {
	b.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		out, err := b.r.Console(b.ctx(), b.id)
		if err == nil && strings.HasSuffix(string(out), want) {
			return
		}
		if time.Now().After(end) {
			b.t.Fatalf("it says %q, %v; want %q at its end", out, err, want)
		}
	}
}

func (b *box) types(text string) { b.act(dsec.ScreenAction{Kind: dsec.ScreenText, Text: text}) }

// answers types until there is an answer: nobody knows how far a machine that was just taken over has booted.
func (b *box) answers() {
	b.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; {
		b.types("o")
		if out, err := b.r.Console(b.ctx(), b.id); err == nil && strings.Contains(string(out), "o") {
			return
		}
		if time.Now().After(end) {
			b.t.Fatal("it does not answer")
		}
	}
}

// TestMachineOfAnySystem has no agent: what needs one says so, and the rest works.
func TestMachineOfAnySystem(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(tiny(t), small))
	b.says("R")
	before := b.picture(dsec.Region{})
	b.types("hi")
	b.says("Rhi")
	if samePicture(b.picture(dsec.Region{}), before) {
		t.Error("nothing is on the screen")
	}
	for what, err := range map[string]error{
		"exec":  func() error { _, _, err := b.try("true"); return err }(),
		"files": func() error { _, err := b.r.Files(b.ctx(), b.id, ""); return err }(),
		"dial":  func() error { _, err := b.r.Dial(b.ctx(), b.id, 80); return err }(),
	} {
		if dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "fullvm") || !strings.Contains(err.Error(), "agent") {
			t.Errorf("%s: %v, want unsupported, and what is missing in which tier", what, err)
		}
	}
	must(t, b.r.Mark(b.ctx(), b.id, "m"))
	b.types(" you")
	b.says("Rhi you")
	must(t, b.r.Revert(b.ctx(), b.id, "m"))
	b.types("!")
	b.says("!")
	must(t, b.r.Mark(b.ctx(), b.id, "m")) // in its place
	must(t, b.r.Pause(b.ctx(), b.id))
	if err := b.r.Act(b.ctx(), b.id, []dsec.ScreenAction{{Kind: dsec.ScreenText, Text: "x"}}); dsec.ClassOf(err) != dsec.IllegalState {
		t.Error(err)
	}
	still := b.picture(dsec.Region{})
	for range 50 { // who stands still can be looked at
		if !samePicture(b.picture(dsec.Region{}), still) {
			t.Fatal("the screen of a paused machine changes")
		}
	}
	must(t, b.r.Mark(b.ctx(), b.id, "paused"))
	if list, err := b.r.List(b.ctx()); err != nil || !list[0].Paused {
		t.Error("a mark had it run:", list, err)
	}
	must(t, b.r.Resume(b.ctx(), b.id))
	must(t, b.r.Power(b.ctx(), b.id, dsec.PowerReset))
	b.says("!R")
	if err := b.r.Power(b.ctx(), b.id, "plug"); dsec.ClassOf(err) != dsec.Invalid {
		t.Error(err)
	}
	if s, err := b.r.Stats(b.ctx(), b.id); err != nil || s.HostMemory < 1<<20 {
		t.Errorf("what the host has of a machine: %+v, %v", s, err)
	}
	must(t, b.r.Stop(b.ctx(), b.id, 0))
	if s, err := b.r.Stats(b.ctx(), b.id); err != nil || s.HostMemory != 0 {
		t.Errorf("what the host has of a stopped machine: %+v, %v", s, err)
	}
	if _, err := b.r.Screenshot(b.ctx(), b.id, dsec.Region{}); dsec.ClassOf(err) != dsec.IllegalState {
		t.Error(err)
	}
	_, err := b.r.Start(b.ctx(), b.id)
	must(t, err)
	b.says("R")
	must(t, b.r.Revert(b.ctx(), b.id, "paused"))
	b.types("?")
	b.says("?")
}

func TestMachineWithoutScreen(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(tiny(t, func(m *diskimage.Manifest) { m.Video, m.Bus = diskimage.None, diskimage.SATA }), small))
	b.says("R")
	if _, err := b.r.Screenshot(b.ctx(), b.id, dsec.Region{}); dsec.ClassOf(err) != dsec.Unsupported {
		t.Error(err)
	}
	if err := b.r.Act(b.ctx(), b.id, []dsec.ScreenAction{{Kind: dsec.ScreenText, Text: "x"}}); dsec.ClassOf(err) != dsec.Unsupported {
		t.Error(err)
	}
}

// TestWhatIsNoDiskImageIsRefused before a machine is started, and leaves nothing.
func TestWhatIsNoDiskImageIsRefused(t *testing.T) {
	w := newWorld(t)
	dirLayer := func(fill func(dir string) error) layer.Local {
		t.Helper()
		tree, out := t.TempDir(), t.TempDir()
		must(t, fill(tree))
		return layerOf(t, out, "dir:"+tree)
	}
	good, err := json.Marshal(diskimage.New(1 << 20))
	must(t, err)
	with := func(disk func(name string) error) func(dir string) error {
		return func(dir string) error {
			if err := os.WriteFile(filepath.Join(dir, diskimage.ManifestFile), good, 0o644); err != nil {
				return err
			}
			return disk(filepath.Join(dir, diskimage.DiskFile))
		}
	}
	for name, c := range map[string]struct {
		l    layer.Local
		want dsec.Class
	}{
		"a root file system": {dirLayer(func(dir string) error { return os.WriteFile(filepath.Join(dir, "sh"), []byte("x"), 0o755) }), dsec.Invalid},
		"a link for a disk":  {dirLayer(with(func(n string) error { return os.Symlink("/dev/vda", n) })), dsec.Invalid},
		"a FIFO":             {dirLayer(with(func(n string) error { return unix.Mkfifo(n, 0o644) })), dsec.Invalid},
		"a device":           {dirLayer(with(func(n string) error { return unix.Mknod(n, unix.S_IFBLK|0o666, int(unix.Mkdev(7, 0))) })), dsec.Invalid},
		"a shorter disk":     {dirLayer(with(func(n string) error { return os.WriteFile(n, make([]byte, 512), 0o644) })), dsec.Invalid},
		"a hostile manifest": {dirLayer(func(dir string) error {
			return os.WriteFile(filepath.Join(dir, diskimage.ManifestFile), bytes.Replace(good, []byte("bios"), []byte("/etc/shadow"), 1), 0o644)
		}), dsec.Invalid},
		"another format": {dirLayer(func(dir string) error {
			return os.WriteFile(filepath.Join(dir, diskimage.ManifestFile), bytes.Replace(good, []byte(`"format":1`), []byte(`"format":9`), 1), 0o644)
		}), dsec.Unsupported},
	} {
		if _, err := w.r.Create(context.Background(), request(c.l, small)); dsec.ClassOf(err) != c.want {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
	l := tiny(t)
	for name, f := range map[string]func(*runtime.Request){
		"a network":      func(r *runtime.Request) { r.Spec.Network = dsec.NetworkOpen },
		"two layers":     func(r *runtime.Request) { r.Layers.Layers = append(slices.Clone(r.Layers.Layers), l) },
		"a main command": func(r *runtime.Request) { r.Spec.Command = []string{"true"} },
		"phases":         func(r *runtime.Request) { r.Spec.Phases = []dsec.Phase{{Name: "a"}} },
	} {
		if _, err := w.r.Create(context.Background(), request(l, small, f)); dsec.ClassOf(err) != dsec.Unsupported {
			t.Errorf("%s: %v, want unsupported", name, err)
		}
	}
	_, err = w.r.Create(context.Background(), request(l, small, func(r *runtime.Request) { r.Spec.Limits.Memory = 1 << 44 }))
	if dsec.ClassOf(err) != dsec.ResourceExhausted || !strings.Contains(err.Error(), "this node has") {
		t.Errorf("more memory than there is: %v, want resource_exhausted", err)
	}
	w.wantNothing(t)
}

// TestMarkThatFindsNoRoom leaves the machine as it was, and the mark before.
func TestMarkThatFindsNoRoom(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(tiny(t), small, func(r *runtime.Request) { r.Spec.Limits.Disk = 12 << 20 }))
	b.says("R")
	b.types("a")
	b.says("Ra")
	kept := 0
	var err error
	for kept < 20 {
		if err = b.r.Mark(b.ctx(), b.id, fmt.Sprint("m", kept)); err != nil {
			break
		}
		kept++
	}
	if kept == 0 || dsec.ClassOf(err) != dsec.NoSpace {
		t.Fatalf("after %d marks: %v, want no_space", kept, err)
	}
	if all, err := b.r.Marks(b.ctx(), b.id); err != nil || len(all) != kept {
		t.Error(all, err)
	}
	if err := b.r.Mark(b.ctx(), b.id, "m0"); err != nil && dsec.ClassOf(err) != dsec.NoSpace {
		t.Error(err)
	}
	b.types("b")
	b.says("b") // behind what QEMU says of it
	must(t, b.r.Revert(b.ctx(), b.id, "m0"))
	b.types("c")
	b.says("c")
}

func TestDamagedMarkCostsNothing(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(tiny(t), small))
	b.says("R")
	must(t, b.r.Mark(b.ctx(), b.id, "m"))
	dir, err := w.disks.Open(b.ctx(), string(b.id))
	must(t, err)
	defer dir.Close()
	name := inside(dir, "mark-m/state")
	must(t, os.Chmod(name, 0o600))
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("damage"), 4096)
	must(t, err)
	must(t, f.Close())
	if err := b.r.Revert(b.ctx(), b.id, "m"); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("%v, want corrupt", err)
	}
	b.types("lives")
	b.says("Rlives")
}

// TestAgentIsKilled has another process make a machine, kills it with SIGKILL, and goes on with the machine.
func TestAgentIsKilled(t *testing.T) {
	w := newWorld(t)
	w.close(t)
	req := request(tiny(t), small)
	for _, at := range []string{"made", "mark"} {
		req.ID = dsec.NewSandboxID("t")
		req.Layers.Lease = string(req.ID)
		text, err := json.Marshal(agentJob{w.dir, w.name, at, req})
		must(t, err)
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "DSEC_TEST_AGENT="+string(text))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		line, _ := bufio.NewReader(out).ReadString('\n')
		if line != "there\n" {
			t.Errorf("%s: %q", at, line)
		}
		must(t, cmd.Process.Signal(syscall.SIGKILL))
		_ = cmd.Wait()
		w.open(t)
		b := &box{w, t, req.ID}
		list, err := w.r.List(b.ctx())
		if err != nil || len(list) != 1 || !list[0].Running || list[0].Paused {
			t.Fatal(at, list, err)
		}
		b.answers()
		if at == "mark" {
			if all, err := w.r.Marks(b.ctx(), b.id); err != nil || len(all) != 1 {
				t.Error("the mark before was lost:", all, err)
			}
			must(t, w.r.Mark(b.ctx(), b.id, "m"))
			must(t, w.r.Revert(b.ctx(), b.id, "m"))
		}
		must(t, w.r.Destroy(b.ctx(), req.ID))
		w.wantNothing(t)
		w.close(t)
	}
	w.open(t)
}
