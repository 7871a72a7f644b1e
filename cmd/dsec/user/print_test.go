package user

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// hostile commands terminals: it clears the screen by both kinds of controls, and
// turns a line around.
const hostile = "a\x1b[2J\u009b2J\u202eb\x7f\r"

func TestNothingPrintedCommandsATerminal(t *testing.T) {
	for _, text := range []string{safe(hostile), ErrorText(errors.New(hostile)), ErrorText(errors.Join(errors.New(hostile), errors.New(hostile)))} {
		if strings.ContainsAny(text, "\x1b\u009b\u202e\x7f\r") || !strings.Contains(text, "a?[2J") {
			t.Errorf("%q", text)
		}
	}
	if got := ErrorText(errors.New("one\ntwo")); got != "one\ntwo" {
		t.Errorf("lines of an error: %q", got)
	}
	var b strings.Builder
	if err := printJSON(&b, map[string]string{hostile: hostile}); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(b.String(), "\x1b\u009b\u202e\x7f\r") || strings.Count(b.String(), "\n") != 1 {
		t.Errorf("%q", b.String())
	}
	var back map[string]string
	if err := json.Unmarshal([]byte(b.String()), &back); err != nil || back[hostile] != hostile {
		t.Errorf("%q, %v", back, err)
	}
}
