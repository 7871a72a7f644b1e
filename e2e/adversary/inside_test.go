package adversary

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/e2e/up"
	"github.com/opendsec/dsec/process"
)

// What answers of a table mean in words of the program.
var meanings = map[string]*regexp.Regexp{
	"unreachable":  regexp.MustCompile(`^blocked: (EPERM|ENETUNREACH|ECONNREFUSED|EHOSTUNREACH|ENETDOWN|EADDRNOTAVAIL) |there is no router`),
	"silence":      regexp.MustCompile(`^blocked: (EPERM|ENETUNREACH|ETIMEDOUT) |there is no router`),
	"not answered": regexp.MustCompile(`^blocked: (NXDOMAIN|lookup .*(refused|unreachable|no route|not permitted))`),
	"empty":        regexp.MustCompile(`^blocked: (empty|ENOENT|EACCES)`),
}

// as says whether what a technique said is what the table has.
func (v Vector) as(user string, s said) error {
	answer := v.Root
	if user != "root" {
		answer = v.User
	}
	want := "blocked: "
	switch {
	case v.Limit != "" && !regexp.MustCompile(`^E[A-Z]+$`).MatchString(answer):
		want = "got: "
	case strings.HasPrefix(answer, "untried: "):
		want, answer = "untried: ", strings.TrimPrefix(answer, "untried: ")
	}
	if re := meanings[answer]; re != nil {
		if !re.MatchString(s.text) {
			return fmt.Errorf("says %q, want %s", s.text, re)
		}
		return nil
	}
	for one := range strings.SplitSeq(answer, ",") {
		if strings.HasPrefix(s.text, want) && strings.Contains(s.text, one) || one == "killed" && s.OOM {
			return nil
		}
	}
	return fmt.Errorf("says %q (exit %d), want %s%s", s.text, s.ExitCode, want, answer)
}

// vectors by class, without damage.
func classes(t *testing.T) map[string][]Vector {
	t.Helper()
	all, err := Vectors()
	if err != nil {
		t.Fatal(err)
	}
	by := map[string][]Vector{}
	for _, v := range all {
		by[v.Class] = append(by[v.Class], v)
	}
	return by
}

// nothingOfItWorksInside: every technique, as root and as a user, in a sandbox
// for each class and user, fails for the reason that the table has, is in the
// record, and leaves machine and neighbours as they were.
func nothingOfItWorksInside(t *testing.T, h *host) {
	major, minor := disk(t)
	env := map[string]string{"ATTACK_DISK_MAJOR": fmt.Sprint(major), "ATTACK_DISK_MINOR": fmt.Sprint(minor),
		"ATTACK_MACHINE": machineServer(t), "ATTACK_NEIGHBOUR": h.server(t)}
	before := h.look(t)
	quiet := h.neighbour(t)
	t.Run("tried", func(t *testing.T) {
		for class, all := range classes(t) {
			if class == "Damage" {
				continue
			}
			for _, user := range []string{"root", "user"} {
				t.Run(class+" as "+user, func(t *testing.T) {
					t.Parallel()
					h.tryAll(t, h.create(t, nil), user, all, env)
				})
			}
		}
	})
	quiet.check(t)
	h.unchanged(t, before)
}

// ofX86 are calls that other machines have never had.
var ofX86 = []string{"old-entry", "ioperm", "iopl", "modify-ldt", "x32-entry"}

// tryAll tries vectors and wants them answered and recorded, and the sandbox alive.
func (h *host) tryAll(t *testing.T, id dsec.SandboxID, user string, all []Vector, env map[string]string) {
	t.Helper()
	ran := map[string]string{}
	for _, v := range all {
		if runtime.GOARCH != "amd64" && slices.Contains(ofX86, v.Name) {
			t.Logf("%s is only of x86, and this is %s", v.Name, runtime.GOARCH)
			continue
		}
		s := h.try(t, id, user, v.Name, env)
		ran[s.exec] = v.Name
		if err := v.as(user, s); err != nil {
			t.Errorf("%s as %s: %v", v.Name, user, err)
		}
	}
	h.recorded(t, id, ran, all...)
	if sb, err := h.Get(t.Context(), id); err != nil || sb.State != dsec.Running {
		t.Errorf("the sandbox is %s, %v", sb.State, err)
	}
	if existed, err := h.Delete(t.Context(), id); err != nil || !existed {
		t.Errorf("delete: %v, %v", existed, err)
	}
}

// recorded wants the beginning, with its arguments, and the end of every command, and
// what else the vectors are to leave.
func (h *host) recorded(t *testing.T, id dsec.SandboxID, ran map[string]string, all ...Vector) {
	t.Helper()
	began, ended, types := map[string]bool{}, map[string]bool{}, map[dsec.EventType]bool{}
	for _, e := range h.events(t, id) {
		types[e.Type] = true
		switch e.Type {
		case dsec.EventExecStarted:
			began[e.Exec] = strings.Contains(e.Detail, "/attack "+ran[e.Exec])
		case dsec.EventExecExited:
			ended[e.Exec] = e.Fields["exit_code"] != ""
		}
	}
	for _, v := range all {
		if v.Recorded != "" && !types[v.Recorded] {
			t.Errorf("%s leaves no event %s", v.Name, v.Recorded)
		}
	}
	h.proved(t, id, ran, all)
	for exec, name := range ran {
		if !began[exec] || !ended[exec] {
			t.Errorf("%s is not in the record: began %v, ended %v", name, began[exec], ended[exec])
		}
	}
}

// proved wants in the audit log that the program of every command was started, and what
// the vectors leave there besides.
func (h *host) proved(t *testing.T, id dsec.SandboxID, ran map[string]string, all []Vector) {
	t.Helper()
	want := map[string]dsec.AuditKind{}
	for _, v := range all {
		want[v.Name] = v.Evidence
	}
	var missing []string
	for end := time.Now().Add(up.Within); ; time.Sleep(10 * time.Millisecond) {
		missing = nil
		told := h.told(t, id)
		for exec, name := range ran {
			if all := told[exec]; !all[dsec.AuditProcess] || want[name] != "" && !all[want[name]] {
				missing = append(missing, fmt.Sprintf("%s (%v, want process %s)", name, all, want[name]))
			}
		}
		if len(missing) == 0 || time.Now().After(end) {
			break
		}
	}
	if len(missing) > 0 {
		t.Errorf("not in the audit log: %s", strings.Join(missing, "; "))
	}
}

// told are the kinds of audit records of each command.
func (h *host) told(t *testing.T, id dsec.SandboxID) map[string]map[dsec.AuditKind]bool {
	t.Helper()
	all := map[string]map[dsec.AuditKind]bool{}
	if err := h.Audit(t.Context(), id, dsec.AuditFilter{}, func(r dsec.AuditRecord) error {
		if all[r.Exec] == nil {
			all[r.Exec] = map[dsec.AuditKind]bool{}
		}
		all[r.Exec][r.Kind] = true
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

func (h *host) events(t *testing.T, id dsec.SandboxID) []dsec.Event {
	t.Helper()
	all, absent, err := h.Past(t.Context(), client.Events{Sandboxes: []dsec.SandboxID{id}, Since: time.Now().Add(-time.Hour)})
	if err != nil || len(absent) > 0 {
		t.Fatalf("%v, absent %v", err, absent)
	}
	return all
}

// nothingIsReached tries the network where there is one: an allow-list that
// allows nothing, and the mode open, in which the machine, its networks and the
// other sandboxes stay closed. What is refused is told.
func nothingIsReached(t *testing.T, h *host) {
	env := map[string]string{"ATTACK_MACHINE": machineServer(t), "ATTACK_NEIGHBOUR": h.server(t)}
	by := classes(t)
	// Of the mode open only what it closes: nothing is sent to others.
	closed := slices.DeleteFunc(slices.Clone(by["Network"]), func(v Vector) bool {
		return v.Name == "net-public" || v.Name == "net-udp" || v.Name == "net-scan-router" || v.Name == "net-multicast"
	})
	for mode, all := range map[dsec.NetworkMode][]Vector{dsec.NetworkAllow: append(by["Network"], by["Names"]...), dsec.NetworkOpen: closed} {
		for _, user := range []string{"root", "user"} {
			t.Run(string(mode)+" as "+user, func(t *testing.T) {
				t.Parallel()
				id := h.create(t, func(s *dsec.Spec) { s.Network = mode })
				if mode == dsec.NetworkAllow {
					defer h.refusals(t, id)
				}
				h.tryAll(t, id, user, slices.DeleteFunc(slices.Clone(all), func(v Vector) bool { return v.Name == "net-forged-source" }), env)
			})
		}
	}
}

// refusals wants in the evidence, which outlives the sandbox, what the policy has
// refused, and a name.
func (h *host) refusals(t *testing.T, id dsec.SandboxID) {
	t.Helper()
	eventually(t, "what was refused is in the evidence", func() bool {
		packets, names := 0, 0
		err := h.Audit(t.Context(), id, dsec.AuditFilter{Kinds: []dsec.AuditKind{dsec.AuditNetwork}}, func(r dsec.AuditRecord) error {
			if strings.HasPrefix(r.Detail, "dns ") {
				names++
			} else {
				packets++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return packets > 0 && names > 0
	})
}

// machineServer listens on every address of this machine until the test ends.
func machineServer(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go serve(l)
	port := l.Addr().(*net.TCPAddr).Port
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, a := range all {
		ip := a.(*net.IPNet).IP
		if ip.To4() == nil || ip.IsLoopback() {
			continue
		}
		addr := net.JoinHostPort(ip.String(), strconv.Itoa(port))
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatalf("not even this machine reaches its %s: %v", addr, err)
		}
		_ = c.Close()
		out = append(out, addr)
	}
	return strings.Join(out, ",")
}

func serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_ = c.Close()
	}
}

// server is the address of one in another sandbox, which itself reaches it.
func (h *host) server(t *testing.T) string {
	t.Helper()
	id := h.create(t, func(s *dsec.Spec) { s.Network = dsec.NetworkOpen })
	if _, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", "while true; do nc -l -p 7000 </dev/null; done"}}); err != nil {
		t.Fatal(err)
	}
	addr := h.sh(t, id, "cat /etc/hosts")
	for line := range strings.SplitSeq(addr, "\n") {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[0], "10.") || len(f) > 1 && strings.HasPrefix(f[0], "100.") {
			addr = f[0]
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for h.code(t, id, "echo | nc -w 1 "+addr+" 7000") != 0 {
		if ctx.Err() != nil {
			t.Fatalf("nobody listens at %q", addr)
		}
	}
	return addr + ":7000"
}
