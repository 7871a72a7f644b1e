package qemu

import "testing"

func TestWhoLetsGoOfThePortIsTold(t *testing.T) {
	m := &machine{resets: make(chan struct{}, 1), stuck: make(chan string, 1)}
	for i, c := range []struct {
		text string
		want int
	}{
		{`{"open":true,"id":"port"}`, 0}, {`{"id":"port"}`, 0}, {`[]`, 0}, {`{"open":false,"id":"port"}`, 1}, {`{"open":true,"id":"port"}`, 0},
		{`{"open":true,"id":"port"}`, 1}, // closed in between
	} {
		m.event("VSERPORT_CHANGE", []byte(c.text))
		if got := len(m.resets); got != c.want {
			t.Errorf("%d, %s: told %d times", i, c.text, got)
		}
		for len(m.resets) > 0 {
			<-m.resets
		}
	}
}

func TestStandingStillForWantOfRoomIsTold(t *testing.T) {
	m := &machine{resets: make(chan struct{}, 1), stuck: make(chan string, 1)}
	for text, want := range map[string]string{
		`{"device":"","node-name":"disk","nospace":true,"operation":"write","action":"stop","reason":"No space left on device"}`: "No space left on device",
		`{"device":"","node-name":"disk","nospace":false,"operation":"write","action":"stop","reason":"Disk quota exceeded"}`:    "Disk quota exceeded",
		`{"device":"","node-name":"disk","nospace":false,"operation":"read","action":"report","reason":"Input/output error"}`:    "",
		`{"action":7}`: "",
		``:             "",
	} {
		for range 2 { // one stands for all that were not heard
			m.event("BLOCK_IO_ERROR", []byte(text))
		}
		heard := ""
		for len(m.stuck) > 0 {
			heard += <-m.stuck
		}
		if heard != want {
			t.Errorf("%s: told %q", text, heard)
		}
	}
	if len(m.resets) > 0 {
		t.Error("a disk without room is no reset")
	}
}
