package nodeapi

import (
	"crypto/sha256"
	"fmt"
	"testing"
)

// TestAProjectForgetsOnlyItsOwnAnswers, however many calls it makes.
func TestAProjectForgetsOnlyItsOwnAnswers(t *testing.T) {
	var x answers
	var sum [sha256.Size]byte
	quiet, _ := x.get("quiet", "kill/1", sum)
	for i := range rememberMost + 1000 {
		if _, first := x.get("loud", fmt.Sprint("kill/", i), sum); !first {
			t.Fatal("answered before it was asked")
		}
	}
	if a, first := x.get("quiet", "kill/1", sum); first || a != quiet {
		t.Error("it was forgotten for another project's calls")
	}
	if _, first := x.get("loud", "kill/0", sum); !first {
		t.Error("the loud one has forgotten nothing")
	}
	if a, first := x.get("loud", fmt.Sprint("kill/", rememberMost), sum); first || a == quiet {
		t.Error("its latest is forgotten")
	}
	if x.count > rememberMost {
		t.Errorf("%d are remembered", x.count)
	}
}

func TestWhatWasForgottenIsDoneAgain(t *testing.T) {
	var x answers
	var sum [sha256.Size]byte
	a, _ := x.get("p", "k", sum)
	x.forget("p", a)
	again, first := x.get("p", "k", sum)
	if !first || again == a {
		t.Fatal("it is still known")
	}
	x.forget("p", a) // who comes late
	if _, first := x.get("p", "k", sum); first {
		t.Error("the second was forgotten with the first")
	}
}
