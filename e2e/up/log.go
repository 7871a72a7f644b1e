package up

import (
	"bytes"
	"encoding/json"
	"strings"
	"sync"
	"syscall"
)

// Log is what dsec up has said; anybody may wait on it.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Count says how often a text is in it.
func (l *Log) Count(text string) int { return strings.Count(l.String(), text) }

// Worth are the lines that are no everyday ones.
func (l *Log) Worth() string {
	var out []string
	for line := range strings.SplitSeq(l.String(), "\n") {
		if !strings.Contains(line, `"level":"INFO"`) {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}

// Child returns the pid of the newest child of that name.
func (m *Machine) Child(name string) int {
	m.t.Helper()
	pid := 0
	for line := range strings.SplitSeq(m.Log.String(), "\n") {
		var e struct {
			Msg, Name string
			PID       int
		}
		if json.Unmarshal([]byte(line), &e) == nil && e.Msg == "child ready" && e.Name == name {
			pid = e.PID
		}
	}
	if pid == 0 {
		m.t.Fatalf("no child %s in\n%s", name, m.Log)
	}
	return pid
}

// Kill ends children with SIGKILL and waits until the supervisor has others.
func (m *Machine) Kill(names ...string) {
	m.t.Helper()
	ready := func(name string) string { return `"msg":"child ready","name":"` + name + `"` }
	before := make([]int, len(names))
	for i, name := range names {
		before[i] = m.Log.Count(ready(name))
		if err := syscall.Kill(m.Child(name), syscall.SIGKILL); err != nil {
			m.t.Fatal(err)
		}
	}
	for i, name := range names {
		m.Await(ready(name), before[i]+1)
	}
}
