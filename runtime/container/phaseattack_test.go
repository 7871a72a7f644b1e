package container

import (
	"os"
	"path/filepath"
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
	run := func(flags string) string { return w.run(t, id, process.Spec{Argv: []string{"/m", flags}}).stdout }
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
