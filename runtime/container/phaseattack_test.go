package container

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// TestNamesBeyondTheLongestPathAreHiddenAndComeBack: a link far below keeps no move
// from its end.
func TestNamesBeyondTheLongestPathAreHiddenAndComeBack(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "setup"}, dsec.Phase{Name: "code", Hide: []string{"/repo/tests"}}, dsec.Phase{Name: "test", ReadOnly: []string{"/repo/tests"}}))
	w.want(t, id, `D=$(head -c 200 /dev/zero | tr '\0' d); ln /repo/tests/hidden.py /tmp/link; cd /tmp
		i=0; while [ $i -lt 30 ]; do mkdir $D; mv link $D/ || exit 1; cd -P $D || exit 1; i=$((i+1)); done; stat -c %h link`, "2\n")
	w.setPhase(t, id, "code")
	w.want(t, id, "cd /tmp; while cd -P d* 2>/dev/null; do true; done; ls | wc -l", "0\n")
	w.setPhase(t, id, "test")
	w.want(t, id, "stat -c %h /repo/tests/hidden.py; cat /repo/tests/hidden.py", "1\nassert "+secret+"\n") // parted: it is read-only
}

// TestProgramsInMemoryAreNotListed: landlock has no path to hold them against.
func TestProgramsInMemoryAreNotListed(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	src, out := filepath.Join(dir, "m.c"), filepath.Join(dir, "m")
	must(t, os.WriteFile(src, []byte(`#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <unistd.h>
int main(int argc, char **argv) {
	if (argc == 1)
		return puts("ran from memory"), 0;
	int self = open("/proc/self/exe", O_RDONLY), m = memfd_create("m", strtoul(argv[1], 0, 16));
	if (m < 0)
		return printf("made: %s\n", strerror(errno)), 0;
	while (sendfile(m, self, 0, 1 << 20) > 0)
		;
	fchmod(m, 0755);
	char *none[] = {"m", 0};
	fexecve(m, none, none);
	return printf("started: %s\n", strerror(errno)), 0;
}
`), 0o644))
	compile(t, out, src, "-static", "-include", "sys/stat.h")
	id := w.create(t, phases(t, dsec.Phase{Name: "all"}, dsec.Phase{Name: "few", Executables: []string{"/bin", "/m"}}), func(r *runtime.Request) {
		r.Layers.Layers = append(r.Layers.Layers, withTools(t, map[string]string{"m": out}))
	})
	run := func(flags string) string { return w.run(t, id, process.Spec{Argv: []string{"/m", flags}}).Stdout }
	if got := run("1"); got != "ran from memory\n" {
		t.Fatalf("where nothing is listed: %q", got)
	}
	w.setPhase(t, id, "few")
	for flags, want := range map[string]string{"1": "made: Permission denied\n", "11": "made: Permission denied\n", "9": "started: Permission denied\n"} {
		if got := run(flags); got != want {
			t.Errorf("flags %s: %q, want %q", flags, got, want)
		}
	}
}

// TestAFullDiskStopsAMoveAndNothingElse: what is to be hidden has no room beside
// itself. Nothing runs and nothing is lost; a stop and the end are as ever, and the
// disk holds no more than before.
func TestAFullDiskStopsAMoveAndNothingElse(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "setup"}, dsec.Phase{Name: "code", Hide: []string{"/repo/tests"}}), func(r *runtime.Request) { r.Spec.Limits.Disk = 64 << 20 })
	w.want(t, id, "head -c 40000000 /dev/urandom > /repo/tests/big && sync && echo ok", "ok\n")
	for range 2 {
		if _, err := w.r.SetPhase(t.Context(), id, "code"); !errors.Is(err, dsec.NoSpace.Err()) {
			t.Fatalf("the move: %v", err)
		}
		if _, err := w.try(id, process.Spec{Argv: []string{"id"}}); !errors.Is(err, dsec.IllegalState.Err()) {
			t.Errorf("a command between phases: %v", err)
		}
		if err := w.r.Resume(t.Context(), id); !errors.Is(err, dsec.IllegalState.Err()) {
			t.Errorf("a resume between phases: %v", err)
		}
	}
	for _, at := range w.onDisk(t, id, shelfName) {
		if !strings.Contains(at, shelfTemp+"/") { // that goes with the next try
			t.Errorf("the shelf says that it is hidden: %s", at)
		}
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	must(t, w.r.Destroy(t.Context(), id))
	w.wantNothing(t)
}

// TestNoCommandTakesTheNameOfAService, which no move would end: that one never ran.
func TestNoCommandTakesTheNameOfAService(t *testing.T) {
	w := newWorld(t)
	id := w.create(t, phases(t, dsec.Phase{Name: "setup"}, dsec.Phase{Name: "code"}, dsec.Phase{Name: "test"}))
	if _, err := w.r.Exec(t.Context(), id, process.Spec{ID: "service", Service: true, Argv: []string{"/nosuch"}}); err == nil {
		t.Fatal("a program that is not there was started")
	}
	for _, to := range []string{"code", "test"} {
		if _, err := w.r.Exec(t.Context(), id, process.Spec{ID: "service", Argv: []string{"sleep", "1000"}}); !errors.Is(err, dsec.Conflict.Err()) {
			t.Errorf("a command with the id of a service, before %s: %v", to, err)
		}
		w.setPhase(t, id, to)
		w.want(t, id, "ps -o args | grep -c '^sleep 1000' || true", "0\n")
	}
}
