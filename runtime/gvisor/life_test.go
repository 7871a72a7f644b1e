package gvisor

import (
	"testing"
)

func TestASentryStartsAndACommandRuns(t *testing.T) {
	w := newWorld(t)
	must(t, w.r.TrySentry(t.Context()))
	id := w.create(t)
	w.want(t, id, "echo hi; id -u", "hi\n0\n")
	must(t, w.r.Destroy(t.Context(), id))
}
