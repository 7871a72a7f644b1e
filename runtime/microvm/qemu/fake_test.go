package qemu

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

var qmpFD = regexp.MustCompile(`socket,id=qmp,fd=(\d+)`)

// fakeQEMU is this test's binary in place of a QEMU that went wrong.
func fakeQEMU(mode string) {
	signal.Ignore(syscall.SIGTERM)
	n, err := strconv.Atoi(qmpFD.FindStringSubmatch(strings.Join(os.Args, " "))[1])
	if err != nil {
		panic(err)
	}
	qmp := os.NewFile(uintptr(n), "qmp")
	fmt.Fprintln(qmp, `{"QMP": {}}`)
	for in := bufio.NewScanner(qmp); in.Scan(); {
		switch {
		case mode == "silent":
		case mode == "nonsense":
			fmt.Fprintln(qmp, "hello")
		case !strings.Contains(in.Text(), "qmp_capabilities"): // stubborn
		default:
			fmt.Fprintln(qmp, `{"return": {}, "id": 1}`)
			for mode == "endless" {
				if _, err := qmp.WriteString("xxxxxxxxxxxxxxxx"); err != nil {
					break
				}
			}
		}
	}
	select {} // it does not end by itself
}

// QEMUs that talk nonsense, without end, or not at all: each is ended in time, and the
// error says what it did.
func TestQEMUsThatWentWrong(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	kernel := dir + "/kernel"
	if err := os.WriteFile(kernel, stub(), 0o644); err != nil {
		t.Fatal(err)
	}
	s := vmm.Shape{Kernel: fileOf(kernel), Initramfs: fileOf(kernel), CPUs: 1, Memory: 32 << 20}
	var pid int
	start := func(mode string) (vmm.VM, error) {
		direct := Direct(func(cmd *exec.Cmd) {
			asRoot(cmd) // for the directory of this binary
			cmd.Path, cmd.Env = self, []string{"DSEC_TEST_FAKE=" + mode}
		})
		d := &Driver{cfg: Config{UID: testUID, UIDs: 1, Spawn: func(c Command) (Process, error) {
			p, err := direct(c)
			if err == nil {
				pid = p.Pid()
			}
			return p, err
		}}, users: map[uint32]bool{}}
		began := time.Now()
		ctx := ctxOf(t)
		if mode == "silent" {
			ctx = limited(t, 300*time.Millisecond)
		}
		m, err := d.Start(ctx, s, vmm.Devices{})
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%s: started, or not, in %v", mode, took)
		}
		if err == nil {
			t.Cleanup(m.Kill)
		} else if len(d.users) != 0 {
			t.Errorf("%s: its user is taken", mode)
		}
		return m, err
	}
	gone := func(mode string) {
		t.Helper()
		if _, err := os.Stat(fmt.Sprint("/proc/", pid)); pid == 0 || err == nil {
			t.Errorf("%s: process %d is there (%v)", mode, pid, err)
		}
	}
	_, err = start("nonsense")
	wantClass(t, err, dsec.Corrupt, "not QMP")
	gone("nonsense")
	_, err = start("silent")
	wantClass(t, err, dsec.Timeout, "deadline")
	gone("silent")
	m, err := start("endless")
	if err == nil {
		select {
		case <-m.Done():
		case <-time.After(stopTime):
			t.Error("endless: it lives")
		}
		wantClass(t, m.Err(), dsec.Corrupt, "a line of more than")
	} else {
		wantClass(t, err, dsec.Corrupt, "a line of more than")
	}
	gone("endless")
	m, err = start("stubborn")
	if err != nil {
		t.Fatal(err)
	}
	wantClass(t, m.Pause(limited(t, 200*time.Millisecond)), dsec.Timeout, "deadline")
	began := time.Now()
	wantClass(t, m.Stop(limited(t, time.Second)), dsec.Timeout, "was killed")
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("stopped in %v", took)
	}
	gone("stubborn")
}
