package failpoint

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
)

func TestHitDoesNothingUnlessArmed(t *testing.T) {
	if err := Hit(t.Context(), "nobody.armed.this"); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { _ = Hit(t.Context(), "nobody.armed.this") }); n != 0 {
		t.Fatalf("%v allocations per hit", n)
	}
}

func TestTimesFailsThatOften(t *testing.T) {
	want := errors.New("as asked")
	disarm := Arm("times", Times(2, want))
	for i, w := range []error{want, want, nil, nil} {
		if err := Hit(t.Context(), "times"); err != w {
			t.Fatalf("hit %d: %v, want %v", i, err, w)
		}
	}
	disarm()
	disarm()
	if Active() {
		t.Fatal("still active after disarm")
	}
}

func TestLaterArmingWinsAndEarlierDisarmLeavesIt(t *testing.T) {
	first := Arm("twice", Once(errors.New("first")))
	second := Arm("twice", Once(errors.New("second")))
	first()
	if err := Hit(t.Context(), "twice"); err == nil || err.Error() != "second" {
		t.Fatalf("got %v", err)
	}
	second()
}

func TestRecordListsNamesInOrder(t *testing.T) {
	stop := Record()
	for _, n := range []string{"b", "a", "b", "c"} {
		_ = Hit(t.Context(), n)
	}
	if got := stop(); !slices.Equal(got, []string{"b", "a", "c"}) {
		t.Fatalf("recorded %v", got)
	}
}

func TestBlockEndsWithItsContext(t *testing.T) {
	entered := make(chan string, 1)
	defer Arm("block", Block(entered, nil))()
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-entered; cancel() }()
	if err := Hit(ctx, "block"); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

func TestKillIsSIGKILL(t *testing.T) {
	if os.Getenv("FAILPOINT_TEST_CHILD") != "" {
		Arm("die", Kill())
		_ = Hit(t.Context(), "die")
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=TestKillIsSIGKILL")
	cmd.Env = append(os.Environ(), "FAILPOINT_TEST_CHILD=1")
	err := cmd.Run()
	ee, ok := errors.AsType[*exec.ExitError](err)
	if !ok || ee.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("child ended with %v", err)
	}
}
