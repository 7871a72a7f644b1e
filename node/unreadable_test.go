package node

import (
	"errors"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"go.etcd.io/bbolt"

	"github.com/opendsec/dsec"
)

// oversized puts records into the ledger as an agent did that had no caps.
func (w *world) oversized(t *testing.T) (ended, live dsec.SandboxID) {
	t.Helper()
	ended, live = dsec.NewSandboxID("nodea"), dsec.NewSandboxID("nodea")
	r := goldenRecord()
	r.Spec.RolloutKey = strings.Repeat("x", maxRecord)
	err := w.ledger.db.Update(func(tx *bbolt.Tx) error {
		r.ID, r.State = ended, dsec.Deleted
		err := tx.Bucket(bucketEnded).Put([]byte(ended), r.encode())
		err = errors.Join(err, tx.Bucket(bucketEndedAt).Put(atKey(r.Changed, []byte(ended)), nil))
		r.ID, r.State = live, dsec.Running
		return errors.Join(err, tx.Bucket(bucketLive).Put([]byte(live), r.encode()))
	})
	if err != nil {
		t.Fatal(err)
	}
	return ended, live
}

func TestARecordThatCannotBeReadHidesNoOther(t *testing.T) {
	w := newWorld(t, nil)
	first := w.create(nil)
	if _, err := w.Delete(t.Context(), first.ID, ""); err != nil {
		t.Fatal(err)
	}
	bad, _ := w.oversized(t)
	second := w.create(nil)
	w.shut()
	w.open()
	list, err := w.List(t.Context(), Filter{All: true})
	if err != nil || len(list) != 2 || list[0].ID != first.ID || list[1].ID != second.ID {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := w.oldEvents(Filter{All: true}, time.Time{}, true); err != nil {
		t.Errorf("events: %v", err)
	}
	if _, err := w.Get(t.Context(), bad); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("the record itself: %v", err)
	}
	var m dto.Metric
	if err := w.cfg.Metrics.unreadable.Write(&m); err != nil || m.GetCounter().GetValue() < 2 {
		t.Errorf("counted %v, %v", m.GetCounter().GetValue(), err)
	}
	if err := w.ledger.prune(w.clock.Now().Add(365*24*time.Hour), Retention{Age: time.Hour, Bytes: 1 << 30}); err != nil {
		t.Errorf("prune: %v", err)
	}
	if _, err := w.Get(t.Context(), bad); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("after its time: %v", err)
	}
}

func TestARecordThatCouldNotBeReadIsNotWrittenAndFailsAlone(t *testing.T) {
	w := newWorld(t, nil)
	large := goldenRecord()
	large.Spec.RolloutKey = strings.Repeat("x", maxRecord)
	all := []change{}
	for i := range 8 {
		r := goldenRecord()
		r.ID = dsec.NewSandboxID("nodea")
		if i == 3 {
			r.Spec.RolloutKey = large.Spec.RolloutKey
		}
		all = append(all, change{do: []op{putEnded(r)}, done: make(chan error, 1)})
	}
	for _, c := range all { // in one batch or several
		w.ledger.changes <- c
	}
	for i, c := range all {
		err := <-c.done
		if (err != nil) != (i == 3) || i == 3 && dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%d: %v", i, err)
		}
	}
	if list, err := w.List(t.Context(), Filter{All: true}); err != nil || len(list) != 7 {
		t.Errorf("%d listed, %v", len(list), err)
	}
}
