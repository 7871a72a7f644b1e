package runtimetest

import (
	"testing"

	"github.com/opendsec/dsec/runtime"
)

func TestFakePassesTheSuite(t *testing.T) {
	Run(t, func(t *testing.T) *Env {
		m := NewMachine()
		e := &Env{Runtime: m.Open()}
		e.Reopen = func(t *testing.T) runtime.Runtime {
			if err := e.Runtime.Close(); err != nil {
				t.Fatal(err)
			}
			return m.Open()
		}
		return e
	})
}
