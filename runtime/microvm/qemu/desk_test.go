package qemu

import "testing"

func TestStandingStillForWantOfRoomIsTold(t *testing.T) {
	m := &machine{resets: make(chan struct{}, 1), full: make(chan struct{}, 1)}
	for text, want := range map[string]bool{
		`{"device":"","node-name":"disk","nospace":true,"operation":"write","action":"stop","reason":"No space left on device"}`: true,
		`{"device":"","node-name":"disk","nospace":false,"operation":"write","action":"report","reason":"Input/output error"}`:   false,
		`{"device":"","node-name":"disk","nospace":true,"operation":"write","action":"report"}`:                                  false,
		`{"action":7}`: false,
		``:             false,
	} {
		for range 2 { // one stands for all that were not heard
			m.event("BLOCK_IO_ERROR", []byte(text))
		}
		heard := 0
		for len(m.full) > 0 {
			<-m.full
			heard++
		}
		if (heard == 1) != want || heard > 1 {
			t.Errorf("%s: told %d times", text, heard)
		}
	}
	if len(m.resets) > 0 {
		t.Error("a disk without room is no reset")
	}
}
