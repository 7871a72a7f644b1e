package ondemandtest

import "testing"

func TestTmpLoopsEvents(t *testing.T) {
	m := byEvents
	m.Loops = true
	dir := t.TempDir()
	o := NewOrigin(t, Backend{Name: "files", URL: "file://" + dir, Dir: dir})
	everyByte(t, m, o)
}
