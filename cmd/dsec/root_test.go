package main

import (
	"errors"
	"strings"
	"testing"
)

func TestUnknownCommandsAreWrongUsage(t *testing.T) {
	for args, want := range map[string]string{
		"nosuch":        `unknown command "nosuch"`,
		"image imort x": `did you mean "import"?`,
		"layer foo":     "usage: dsec layer COMMAND",
	} {
		root := newRoot()
		root.SetArgs(strings.Fields(args))
		err := root.Execute()
		if _, ok := errors.AsType[wrongUsage](err); !ok || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
