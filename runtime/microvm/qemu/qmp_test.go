package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// talk is a monitor whose other end is played by the test, which answers one line.
func talk(t *testing.T, play func(io.Writer, string)) (*monitor, *[]string) {
	t.Helper()
	here, there := net.Pipe()
	var events []string
	m := newMonitor(here, func(name string, data json.RawMessage) { events = append(events, name+string(data)) })
	t.Cleanup(func() { _ = there.Close(); <-m.done })
	go func() {
		r := bufio.NewReader(there)
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			play(there, line)
		}
	}()
	return m, &events
}

func say(w io.Writer, text string) { _, _ = io.WriteString(w, text) }

func TestQMPAnswersAndEvents(t *testing.T) {
	m, events := talk(t, func(w io.Writer, line string) {
		say(w, `{"QMP": {"version": {}}}`+"\r\n"+`{"event": "STOP", "data": {"a": 1}, "timestamp": {}}`+"\n"+`{"return": {"late": 1}, "id": 77}`+"\n")
		if strings.Contains(line, "refuse") {
			say(w, `{"error": {"class": "GenericError", "desc": "no such thing"}, "id": 2}`+"\n")
			return
		}
		say(w, `{"return": {"status": "running"}, "id": 1}`+"\n")
	})
	var s struct{ Status string }
	if err := m.call(t.Context(), "query-status", nil, &s); err != nil || s.Status != "running" {
		t.Errorf("%+v, %v", s, err)
	}
	wantClass(t, m.call(t.Context(), "refuse", nil, nil), dsec.Internal, "no such thing")
	_ = m.conn.Close()
	<-m.done
	if len(*events) != 2 || (*events)[0] != `STOP{"a": 1}` {
		t.Errorf("%q", *events)
	}
}

// A monitor that goes on where another one was: in the middle of an answer, with others
// behind it that were for that one.
func TestQMPInTheMiddle(t *testing.T) {
	for name, before := range map[string]string{
		"a part":          `tus": "paused"}, "id": 1}` + "\n",
		"an empty line":   "\n",
		"its answer":      `{"return": {"status": "paused"}, "id": 1}` + "\n",
		"its error":       `{"error": {"class": "GenericError", "desc": "x"}, "id": 2}` + "\n",
		"an interruption": `{"error": {"class": "GenericError", "desc": "JSON parse error"}}` + "\n",
		"a greeting":      `n": {"qemu": {}}}` + "\n" + `{"QMP": {}}` + "\n",
	} {
		here, there := net.Pipe()
		var events []string
		m := resumeMonitor(here, func(name string, _ json.RawMessage) { events = append(events, name) })
		go func() {
			say(there, before+`{"event": "SHUTDOWN", "data": {}}`+"\n")
			line, err := bufio.NewReader(there).ReadString('\n')
			var q struct{ ID int64 }
			if err != nil || json.Unmarshal([]byte(line), &q) != nil || q.ID < 1<<32 {
				t.Errorf("%s: asked %q", name, line)
			}
			text, _ := json.Marshal(map[string]any{"return": map[string]string{"status": "running"}, "id": q.ID})
			say(there, string(text)+"\n"+"nonsense\n") // from here on it is no excuse
		}()
		var s struct{ Status string }
		if err := m.call(t.Context(), "query-status", nil, &s); err != nil || s.Status != "running" {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
		<-m.done
		if !errors.Is(m.err, errMonitor) || len(events) != 1 {
			t.Errorf("%s: %v, events %v", name, m.err, events)
		}
		_ = there.Close()
	}
	// Nonsense without end is none that another one asked for.
	here, there := net.Pipe()
	m := resumeMonitor(here, nil)
	go func() {
		for {
			if _, err := io.WriteString(there, strings.Repeat("x", 1000)+"\n"); err != nil {
				return
			}
		}
	}()
	<-m.done
	if !errors.Is(m.err, errMonitor) {
		t.Error(m.err)
	}
}

func TestWhatIsNoQMPEndsTheMonitor(t *testing.T) {
	for name, text := range map[string]string{
		"no JSON":     "hello\n",
		"half a JSON": `{"return": ` + "\n",
		"a list":      "[1]\n",
		"nothing":     "{}\n",
		"both":        `{"return": 1, "error": {}, "id": 1}` + "\n",
		"no id":       `{"return": {}}` + "\n",
		"no number":   `{"return": {}, "id": "x"}` + "\n",
		"deep":        strings.Repeat("[", 100000) + "\n",
		"endless":     strings.Repeat("x", 1000),
	} {
		m, _ := talk(t, func(w io.Writer, _ string) {
			say(w, text)
			for name == "endless" {
				if _, err := io.WriteString(w, text); err != nil {
					return
				}
			}
		})
		began := time.Now()
		err := m.call(t.Context(), "query-status", nil, nil)
		wantClass(t, err, dsec.Corrupt, "not QMP")
		if !errors.Is(err, errMonitor) || time.Since(began) > 5*time.Second {
			t.Errorf("%s: %v after %v", name, err, time.Since(began))
		}
		wantClass(t, m.call(t.Context(), "query-status", nil, nil), dsec.Corrupt, "not QMP")
	}
}

func TestQMPCallsEnd(t *testing.T) {
	// Nobody answers.
	m, _ := talk(t, func(io.Writer, string) {})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantClass(t, m.call(ctx, "quit", nil, nil), dsec.Timeout, "deadline")
	// Nobody reads.
	here, there := net.Pipe()
	m = newMonitor(here, nil)
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantClass(t, m.call(ctx, "quit", nil, nil), dsec.Timeout, "quit")
	_ = there.Close()
	<-m.done
	// The other end goes.
	m, _ = talk(t, func(w io.Writer, _ string) { _ = w.(net.Conn).Close() })
	wantClass(t, m.call(t.Context(), "quit", nil, nil), dsec.Unavailable, "EOF")
}

// Whatever QEMU says, the monitor ends with it, and a call that waits is answered or told.
func FuzzQMP(f *testing.F) {
	f.Add([]byte(`{"QMP": {}}` + "\n" + `{"return": {}, "id": 1}` + "\n"))
	f.Add([]byte(`{"event": "SHUTDOWN", "data": {"reason": "guest-reset"}}` + "\n"))
	f.Add([]byte(`{"error": {"class": 1}, "id": 1}` + "\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		here, there := net.Pipe()
		var v machine
		m := newMonitor(here, v.event)
		go func() {
			_, _ = bufio.NewReader(there).ReadString('\n')
			_, _ = there.Write(text)
			_ = there.Close()
		}()
		var into struct{ Status string }
		err := m.call(t.Context(), "query-status", nil, &into)
		<-m.done
		if c := dsec.ClassOf(err); err != nil && c != dsec.Corrupt && c != dsec.Unavailable && c != dsec.Internal {
			t.Errorf("%v", err)
		}
	})
}
