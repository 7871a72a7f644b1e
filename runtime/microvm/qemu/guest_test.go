package qemu

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/e2e/vm"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/runtime/microvm/boot"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// testUID is the first of some users that own nothing.
const testUID = 61440

// guest is what every test boots: made once for the package.
type guest struct {
	dir    string // gone with the package
	shape  vmm.Shape
	driver *Driver
	err    error
}

var (
	once   sync.Once
	shared guest
)

func TestMain(m *testing.M) {
	if job := os.Getenv("DSEC_TEST_BUILDER"); job != "" {
		builder(job)
		return
	}
	hold.MainIfAsked(nil)
	if job := os.Getenv("DSEC_TEST_OWNER"); job != "" {
		owner(job)
		return
	}
	if mode := os.Getenv("DSEC_TEST_FAKE"); mode != "" {
		fakeQEMU(mode)
		return
	}
	code := m.Run()
	if shared.driver != nil {
		shared.driver.Close()
	}
	if shared.dir != "" {
		_ = os.RemoveAll(shared.dir)
	}
	os.Exit(code)
}

// theGuest returns the guest, and proves that there is no QEMU when it skips.
func theGuest(t testing.TB) guest {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skipf("%v (PATH=%s)", err, os.Getenv("PATH"))
	}
	once.Do(func() { shared.err = shared.make() })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared
}

func (g *guest) make() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if g.dir, err = os.MkdirTemp("", "dsec-qemu-test-"); err != nil {
		return err
	}
	init := filepath.Join(g.dir, "init")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", init, "./testdata/init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	program, err := os.ReadFile(init)
	if err != nil {
		return err
	}
	cache, err := filepath.Abs("../../../.cache/vm")
	if err != nil {
		return err
	}
	// The package of the kernel comes through the machine's apt.
	k, err := vm.Fetch(ctx, cache)
	if err != nil {
		return err
	}
	k.Close()
	built, err := boot.Build(ctx, boot.Config{Cache: cache, Init: program,
		Modules: []string{"virtio_pci", "virtio_console", "virtio_blk", "virtio_net", "virtio_pmem", "nd_pmem", "erofs"}})
	if err != nil {
		return err
	}
	g.shape = vmm.Shape{Kernel: fileOf(built.Image), Initramfs: fileOf(built.Initramfs), CPUs: 1, Memory: 128 << 20,
		Pmem: []int64{4 << 20, 8 << 20}, Disk: 1 << 20, NIC: true}
	g.driver, err = New(ctx, Config{Dir: filepath.Join(g.dir, "templates"), UID: testUID})
	return err
}

func fileOf(name string) vmm.File {
	b, err := os.ReadFile(name)
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(b)
	return vmm.File{Path: name, SHA256: hex.EncodeToString(sum[:])}
}

// devices makes files for one machine: slot 0 begins with a word, slot 1 is empty.
func (g guest) devices(t testing.TB, word string) vmm.Devices {
	t.Helper()
	dir := t.TempDir()
	layer, disk := filepath.Join(dir, "layer"), filepath.Join(dir, "disk")
	sized(t, layer, g.shape.Pmem[0], word)
	sized(t, disk, g.shape.Disk, "disk "+word)
	return vmm.Devices{Pmem: []string{layer}, Disk: disk}
}

func sized(t testing.TB, name string, size int64, begins string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(begins), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name, size); err != nil {
		t.Fatal(err)
	}
}

// ready waits for the guest's first line.
func ready(_ context.Context, ch net.Conn) error {
	line, err := readWord(ch)
	if err == nil && line != "ready" {
		err = fmt.Errorf("the guest said %q", line)
	}
	return err
}

// readWord reads one line and nothing behind it.
func readWord(ch net.Conn) (string, error) {
	var b strings.Builder
	for one := make([]byte, 1); ; {
		if _, err := ch.Read(one); err != nil {
			return b.String(), err
		}
		if one[0] == '\n' {
			return b.String(), nil
		}
		b.WriteByte(one[0])
	}
}

func (g guest) template(t testing.TB) vmm.Template {
	t.Helper()
	tp, err := g.driver.BuildTemplate(ctxOf(t), g.shape, ready)
	if err != nil {
		t.Fatal(err)
	}
	return tp
}

func (g guest) clone(t testing.TB, word string) vmm.VM {
	t.Helper()
	tp := g.template(t)
	m, err := g.driver.Clone(ctxOf(t), tp, g.devices(t, word))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	return m
}

// ctxOf bounds what a test waits for.
func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// ask says a line to the guest, and returns its answer.
func ask(t testing.TB, m vmm.VM, line string) string {
	t.Helper()
	ch := m.Channel()
	if err := ch.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintln(ch, line); err != nil {
		t.Fatalf("%s: %v; %v", line, err, m.Err())
	}
	answer, err := bufio.NewReader(ch).ReadString('\n')
	if err != nil {
		select {
		case <-m.Done():
		case <-time.After(2 * time.Second):
		}
		t.Fatalf("%s: %v; %v", line, err, m.Err())
	}
	return strings.TrimSuffix(answer, "\n")
}

func want(t testing.TB, m vmm.VM, line, answer string) {
	t.Helper()
	if got := ask(t, m, line); got != answer {
		t.Errorf("%s: %q, want %q", line, got, answer)
	}
}

func wantClass(t testing.TB, err error, class dsec.Class, text string) {
	t.Helper()
	if err == nil || dsec.ClassOf(err) != class || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v of class %q, want class %q and %q in it", err, dsec.ClassOf(err), class, text)
	}
	if err != nil && !errors.Is(err, class.Err()) {
		t.Errorf("%v is not Is(%s)", err, class)
	}
}

func hexOf(word string) string {
	b := make([]byte, 8)
	copy(b, word)
	return hex.EncodeToString(b)
}

// qemus lists the processes of this process's QEMUs: none may be left.
func qemus(t testing.TB) (left []string) {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err == nil && strings.Contains(string(text), "\nUid:\t61") && strings.Contains(string(text), fmt.Sprintf("\nPPid:\t%d\n", os.Getpid())) {
			left = append(left, name)
		}
	}
	return left
}

func limited(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
