package fullvm

import (
	"bytes"
	"context"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/runtime"
)

// Where things are on the screen of demo/screen, and their colors.
var (
	button = dsec.Region{X: 40, Y: 40, Width: 320, Height: 100}
	field  = dsec.Region{X: 41, Y: 181, Width: 900, Height: 58}
	paper  = dsec.Region{X: 40, Y: 330, Width: 560, Height: 240}
)

const (
	idle, clicked, ink, black = 0x2f6fd0, 0x2fa050, 0xc02030, 0x000000
)

// TestMachine boots one machine and does with it, in order, all that has to be seen; a boot takes most of the
// time that these tests have.
func TestMachine(t *testing.T) {
	if os.Getenv("DSEC_LONG") == "" {
		t.Skip("it boots a whole Debian, emulated: DSEC_LONG is not set")
	}
	w := newWorld(t)
	b := w.boot(t)
	t.Run("commands", b.commands)
	t.Run("files", b.files)
	t.Run("memory", b.memory)
	t.Run("screen", b.screen)
	t.Run("mark and revert", b.revert)
	t.Run("adoption", b.adoption)
	t.Run("pause", b.pause)
	t.Run("confinement", b.confinement)
	t.Run("killed", b.killed)
	t.Run("stop, start", b.restart)
}

func (b *box) in(t *testing.T) *box { return &box{b.world, t, b.id} }

func (b *box) commands(t *testing.T) {
	b = b.in(t)
	if out := b.run("id -u; cat /proc/1/comm; uname -s"); out != "0\nsystemd\nLinux\n" {
		t.Errorf("it is no machine with an init of its own: %q", out)
	}
	if out := b.run("nproc; grep MemTotal /proc/meminfo"); !strings.HasPrefix(out, "2\n") {
		t.Errorf("it has other processors than two: %q", out)
	}
	if _, res, err := b.try("exit 7"); err != nil || res.ExitCode != 7 {
		t.Error(res, err)
	}
	if out := b.run("systemctl is-active dsec-guest screen"); out != "active\nactive\n" {
		t.Errorf("commands do not see the machine's services: %q", out)
	}
	out, err := b.r.Console(b.ctx(), b.id)
	if err != nil || !strings.Contains(string(out), "Debian GNU/Linux 12") {
		t.Errorf("the console has no login: %q, %v", out, err)
	}
}

func (b *box) files(t *testing.T) {
	b = b.in(t)
	fs, err := b.r.Files(b.ctx(), b.id, "")
	must(t, err)
	b.run("echo from inside >/root/there")
	var text bytes.Buffer
	if _, err := fs.Read(b.ctx(), "/root/there", 0, -1, &text); err != nil || text.String() != "from inside\n" {
		t.Errorf("%q, %v", text.String(), err)
	}
	_, err = fs.Write(b.ctx(), "/srv/here", strings.NewReader("from outside"), files.WriteOptions{})
	must(t, err)
	if out := b.run("cat /srv/here"); out != "from outside" {
		t.Errorf("%q", out)
	}
	user, err := b.r.Files(b.ctx(), b.id, "agent")
	must(t, err)
	if _, err := user.Read(b.ctx(), "/etc/shadow", 0, -1, &text); dsec.ClassOf(err) != dsec.PermissionDenied {
		t.Error("a user reads what is not his:", err)
	}
}

func (b *box) screen(t *testing.T) {
	b = b.in(t)
	b.until("USB_Tablet") // the guest has found it
	b.until("USB_Keyboard")
	b.see(button, idle, 20000)
	if n := colors(b.picture(button), clicked); n != 0 {
		t.Fatalf("%d pixels of a button that was clicked", n)
	}
	before := b.picture(field)
	b.act(dsec.ScreenAction{Kind: dsec.ScreenClick, X: 200, Y: 90})
	b.see(button, clicked, 20000)
	b.until("clicks=1 ")
	b.until(" x=200 y=90 ")
	b.act(dsec.ScreenAction{Kind: dsec.ScreenClick, X: 100, Y: 60, Count: 2})
	b.until("clicks=3 ")
	b.act(dsec.ScreenAction{Kind: dsec.ScreenText, Text: "Hello, World! ~{}|"})
	b.until("text=Hello, World! ~{}|")
	if n := colors(b.see(field, black, 500), black); colors(before, black) != 0 {
		t.Errorf("%d black pixels, and %d before", n, colors(before, black))
	}
	b.act(dsec.ScreenAction{Kind: dsec.ScreenText, Text: "é→", Compose: true}, dsec.ScreenAction{Kind: dsec.ScreenKeys, Keys: []string{"Backspace"}})
	b.until("text=Hello, World! ~{}|é\n")
	b.act(dsec.ScreenAction{Kind: dsec.ScreenScroll, X: 500, Y: 500, DY: 3})
	b.until("wheel=-3 ")
	b.act(dsec.ScreenAction{Kind: dsec.ScreenDrag, X: 100, Y: 400, ToX: 500, ToY: 500})
	b.see(paper, ink, 200)
	if n := colors(b.picture(dsec.Region{X: 80, Y: 380, Width: 40, Height: 40}), ink); n == 0 {
		t.Error("what was dragged does not begin where it should")
	}
	for _, c := range []struct {
		a    dsec.ScreenAction
		want dsec.Class
	}{
		{dsec.ScreenAction{Kind: dsec.ScreenText, Text: "ü"}, dsec.Unsupported}, {dsec.ScreenAction{Kind: dsec.ScreenMove, X: 100000}, dsec.Invalid},
		{dsec.ScreenAction{Kind: dsec.ScreenKeys, Keys: []string{"any"}}, dsec.Invalid}, {dsec.ScreenAction{Kind: "dance"}, dsec.Invalid}, {dsec.ScreenAction{Kind: dsec.ScreenText, Text: "\x01"}, dsec.Invalid},
	} {
		if err := b.r.Act(b.ctx(), b.id, []dsec.ScreenAction{c.a}); dsec.ClassOf(err) != c.want {
			t.Errorf("%+v: %v, want %s", c.a, err, c.want)
		}
	}
	if _, err := b.r.Screenshot(b.ctx(), b.id, dsec.Region{X: 1, Y: 1, Width: 100000, Height: 1}); dsec.ClassOf(err) != dsec.Invalid {
		t.Error(err)
	}
}

func (b *box) revert(t *testing.T) {
	b = b.in(t)
	was := b.picture(dsec.Region{})
	text := b.shown()
	b.run("echo before >/root/disk; sync; (sleep 1000 & echo $! >/run/lives)")
	began := time.Now()
	must(t, b.r.Mark(b.ctx(), b.id, "first"))
	t.Logf("a mark took %v", time.Since(began).Round(10*time.Millisecond))
	b.run("echo after >/root/disk; sync; kill $(cat /run/lives)")
	b.act(dsec.ScreenAction{Kind: dsec.ScreenClick, X: 200, Y: 90}, dsec.ScreenAction{Kind: dsec.ScreenText, Text: "later"})
	b.until("later")
	if all, err := b.r.Marks(b.ctx(), b.id); err != nil || len(all) != 1 || all[0] != "first" {
		t.Error(all, err)
	}
	for range 2 { // and once more from there
		began = time.Now()
		must(t, b.r.Revert(b.ctx(), b.id, "first"))
		t.Logf("going back took %v", time.Since(began).Round(10*time.Millisecond))
		if got := b.shown(); got != text {
			t.Errorf("the screen shows %q, and showed %q", got, text)
		}
		if !samePicture(b.picture(dsec.Region{}), was) {
			t.Error("the picture is another one")
		}
		if out := b.run("cat /root/disk; kill -0 $(cat /run/lives) && echo lives"); out != "before\nlives\n" {
			t.Errorf("its disk and programs are not what they were: %q", out)
		}
		now := time.Now().Unix()
		if at, err := strconv.ParseInt(strings.TrimSpace(b.run("date +%s")), 10, 64); err != nil || at < now-1 || at > now+10 {
			t.Errorf("its clock says %d, and it is %d", at, now)
		}
	}
	if out, err := b.r.Console(b.ctx(), b.id); err != nil || !strings.Contains(string(out), "Debian GNU/Linux 12") {
		t.Errorf("the console was lost: %q, %v", out, err)
	}
	if err := b.r.Revert(b.ctx(), b.id, "second"); dsec.ClassOf(err) != dsec.NotFound {
		t.Error(err)
	}
	if err := b.r.Mark(b.ctx(), b.id, "../x"); dsec.ClassOf(err) != dsec.Invalid {
		t.Error(err)
	}
	// It goes on from there as from anywhere.
	b.act(dsec.ScreenAction{Kind: dsec.ScreenClick, X: 200, Y: 90})
	b.until("clicks=4 ")
}

// samePicture compares pixels.
func samePicture(a, b image.Image) bool {
	var x, y bytes.Buffer
	return png.Encode(&x, a) == nil && png.Encode(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
}

func (b *box) adoption(t *testing.T) {
	b = b.in(t)
	b.run("echo still >/run/here")
	b.close(t)
	b.open(t)
	list, err := b.r.List(b.ctx())
	if err != nil || len(list) != 1 || !list[0].Running || list[0].ID != b.id {
		t.Fatal(list, err)
	}
	if out := b.run("cat /run/here"); out != "still\n" {
		t.Errorf("it is another machine: %q", out)
	}
	b.see(button, clicked, 20000)
	must(t, b.r.Revert(b.ctx(), b.id, "first"))
	b.until("clicks=3 ")
}

func (b *box) pause(t *testing.T) {
	b = b.in(t)
	must(t, b.r.Pause(b.ctx(), b.id))
	if _, _, err := b.try("true"); dsec.ClassOf(err) != dsec.IllegalState {
		t.Error(err)
	}
	b.see(button, clicked, 20000)
	must(t, b.r.Resume(b.ctx(), b.id))
	b.run("true")
	s, err := b.r.Stats(b.ctx(), b.id)
	if err != nil || s.Memory < 50<<20 || s.HostMemory < 50<<20 || s.CPU < time.Second || s.Disk < 50<<20 || s.DiskLimit != 2<<30 {
		t.Errorf("%+v, %v", s, err)
	}
}

// pid of the machine's QEMU.
func (b *box) pid() int {
	b.t.Helper()
	p, err := b.hold.FindPlain(b.ctx(), "vm-"+machinePrefix+string(b.id))
	must(b.t, err)
	defer p.Close()
	return p.Info().PID
}

func (b *box) confinement(t *testing.T) {
	b = b.in(t)
	at := filepath.Join("/proc", strconv.Itoa(b.pid()))
	status, err := os.ReadFile(filepath.Join(at, "status"))
	must(t, err)
	for _, want := range []string{"Seccomp:\t2", "CapEff:\t0000000000000000", "NoNewPrivs:\t1"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("QEMU has no %q", want)
		}
	}
	if strings.Contains(string(status), "Uid:\t0") {
		t.Error("QEMU runs as root")
	}
	ours, _ := os.Readlink("/proc/self/ns/net")
	if its, err := os.Readlink(filepath.Join(at, "ns/net")); err != nil || its == ours {
		t.Error("QEMU is in the network of this machine:", err)
	}
	group, err := os.ReadFile(filepath.Join(at, "cgroup"))
	if err != nil || !strings.Contains(string(group), string(b.id)) {
		t.Errorf("QEMU is in no control group of its own: %s %v", group, err)
	}
	line, err := os.ReadFile(filepath.Join(at, "cmdline"))
	must(t, err)
	if bytes.Contains(line, []byte(b.dir)) {
		t.Errorf("QEMU was told a path: %q", line)
	}
}

func (b *box) killed(t *testing.T) {
	b = b.in(t)
	must(t, syscall.Kill(b.pid(), syscall.SIGKILL))
	var x runtime.Exit
	select {
	case x = <-b.r.Exits():
	case <-time.After(10 * time.Second):
		t.Fatal("nobody was told")
	}
	if x.ID != b.id || x.Cause != dsec.CauseUnknown || x.By != dsec.InducedByUnknown || len(x.Evidence) == 0 || !strings.Contains(x.Evidence[0], "signal: killed") {
		t.Errorf("%+v", x)
	}
	if _, _, err := b.try("true"); dsec.ClassOf(err) != dsec.SandboxGone {
		t.Error(err)
	}
	if _, err := b.r.Screenshot(b.ctx(), b.id, dsec.Region{}); dsec.ClassOf(err) != dsec.SandboxGone {
		t.Error(err)
	}
	// Another agent is told, too, until somebody acknowledges.
	b.close(t)
	b.open(t)
	select {
	case y := <-b.r.Exits():
		if y.ID != x.ID || y.Cause != x.Cause || y.Evidence[0] != x.Evidence[0] {
			t.Errorf("%+v, and before %+v", y, x)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nobody was told again")
	}
	must(t, b.r.Stop(b.ctx(), b.id, 0))
	if names, err := b.driver.Names(context.Background()); err != nil || len(names) != 0 {
		t.Error("machines are left:", names, err)
	}
}

// restart boots the disk of a machine that was killed, and ends it by its power button.
func (b *box) restart(t *testing.T) {
	if os.Getenv("DSEC_LONG") == "" {
		t.Skip("a second boot: DSEC_LONG is not set")
	}
	b = b.in(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	_, err := b.r.Start(ctx, b.id)
	must(t, err)
	if out := b.run("cat /root/disk"); out != "before\n" {
		t.Errorf("the disk is not what it was: %q", out)
	}
	life := b.run("cat /proc/sys/kernel/random/boot_id")
	must(t, b.r.Power(b.ctx(), b.id, dsec.PowerReset))
	for end := time.Now().Add(2 * time.Minute); ; {
		out, _, err := b.try("cat /proc/sys/kernel/random/boot_id; systemctl is-active systemd-logind")
		if err == nil && strings.HasSuffix(out, "\nactive\n") && !strings.HasPrefix(out, life) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it did not begin anew: %q, %v", out, err)
		}
	}
	must(t, b.r.Power(b.ctx(), b.id, dsec.PowerButton))
	select {
	case x := <-b.r.Exits():
		if x.ID != b.id || x.Cause != dsec.CauseCompleted || x.By != dsec.InducedBySelf {
			t.Errorf("%+v", x)
		}
	case <-time.After(time.Minute):
		t.Fatal("it did not end by its power button")
	}
}

// TestUEFIOfTheSmallDisk boots it with the other firmware, which needs more memory, stops it, and goes back to a mark.
func TestUEFIOfTheSmallDisk(t *testing.T) {
	w := newWorld(t)
	disk := smallLayer(t, func(m *diskimage.Manifest) { m.Firmware, m.Video = diskimage.UEFI, diskimage.Virtio })
	b := w.create(t, request(disk, modest, func(r *runtime.Request) { r.Spec.Limits.Memory, r.Spec.Limits.Disk = 256<<20, 512<<20 }))
	if out := b.run("test -d /sys/firmware/efi && echo uefi"); out != "uefi\n" {
		t.Errorf("%q", out)
	}
	b.run("echo before >/root/f; sync; echo here >/run/lives")
	must(t, b.r.Mark(b.ctx(), b.id, "m"))
	b.run("echo after >/root/f; sync; rm /run/lives")
	must(t, b.r.Revert(b.ctx(), b.id, "m"))
	if out := b.run("cat /root/f /run/lives"); out != "before\nhere\n" {
		t.Errorf("after a revert: %q", out)
	}
	must(t, b.r.Stop(b.ctx(), b.id, 0))
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	_, err := b.r.Start(ctx, b.id)
	must(t, err)
	if out := b.run("cat /root/f; test -d /sys/firmware/efi && echo uefi"); out != "before\nuefi\n" {
		t.Errorf("after a start: %q", out)
	}
}

// TestUEFI boots the same image with the other firmware.
func TestUEFI(t *testing.T) {
	if os.Getenv("DSEC_LONG") == "" {
		t.Skip("another boot: DSEC_LONG is not set")
	}
	w := newWorld(t)
	debianDisk(t) // makes the image
	f, err := os.Open("../../.cache/demo/disk.qcow2")
	must(t, err)
	defer f.Close()
	s, err := diskimage.Read(f)
	must(t, err)
	m := diskimage.New(s.Size)
	m.Agent, m.Firmware, m.Video, m.Bus = true, diskimage.UEFI, diskimage.Virtio, diskimage.SATA
	b := w.create(t, request(buildLayer(t, t.TempDir(), m, s)))
	if out := b.run("test -d /sys/firmware/efi && ls /dev/sda && echo uefi"); !strings.HasSuffix(out, "uefi\n") {
		t.Errorf("%q", out)
	}
	b.until("USB_Tablet")
	must(t, b.r.Mark(b.ctx(), b.id, "m"))
	b.act(dsec.ScreenAction{Kind: dsec.ScreenClick, X: 200, Y: 90})
	b.see(button, clicked, 20000)
	must(t, b.r.Revert(b.ctx(), b.id, "m"))
	b.see(button, idle, 20000)
}
