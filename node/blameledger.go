package node

import (
	"encoding/json"

	"go.etcd.io/bbolt"

	"github.com/opendsec/dsec"
)

// What sandboxes are blamed on is written without their turns, and therefore
// apart from their records, which an operation at work may have encoded before:
// whoever reads a record joins the two. See docs/formats/record.md.

// blameVersion is the first byte of an encoded blame.
const blameVersion = 1

func encodeBlame(bl *dsec.Blame) []byte {
	b, err := json.Marshal(bl)
	if err != nil { // plain data
		panic(err)
	}
	return append([]byte{blameVersion}, b...)
}

func decodeBlame(b []byte) (*dsec.Blame, error) {
	bl := &dsec.Blame{}
	if err := decodeValue("blame", blameVersion, b, bl); err != nil {
		return nil, err
	}
	if !bl.Cause.Infra() {
		return nil, dsec.Errorf(dsec.Corrupt, "read blame", "", "cause %s", dsec.Quote(string(bl.Cause)))
	}
	return bl, nil
}

// putBlame writes what the sandbox is blamed on at the moment of writing, not of
// asking, so that it does not matter which of two writes is first; done is to be
// called when it is written.
func (b *box) putBlame() (put op, done func()) {
	var wrote int
	put = func(tx *bbolt.Tx) error {
		b.mu.Lock()
		defer b.mu.Unlock()
		wrote = b.blames
		key := []byte(b.id)
		switch {
		case tx.Bucket(bucketLive).Get(key) != nil && b.rec.Blame != nil:
			return tx.Bucket(bucketBlame).Put(key, encodeBlame(b.rec.Blame))
		case tx.Bucket(bucketEnded).Get(key) == nil:
			return tx.Bucket(bucketBlame).Delete(key)
		}
		return putEnded(&b.rec)(tx) // it was buried meanwhile
	}
	return put, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.blamesIn = max(b.blamesIn, wrote)
	}
}

// endedWith lists the deleted sandboxes that lived with a trouble and do not say
// so, but those that are known.
func (l *ledger) endedWith(t *trouble, known map[dsec.SandboxID]bool) (out []dsec.SandboxID, err error) {
	err = l.eachEnded(t.at, func(r *record) bool {
		if !known[r.ID] && r.livedWith(t) && r.blame(t) {
			out = append(out, r.ID)
		}
		return true
	})
	return out, err
}

// blameEnded changes the record of a deleted sandbox.
func blameEnded(id dsec.SandboxID, t *trouble) op {
	return func(tx *bbolt.Tx) error {
		raw := tx.Bucket(bucketEnded).Get([]byte(id))
		if raw == nil { // pruned meanwhile
			return nil
		}
		r, err := decodeRecord(raw)
		if err != nil {
			return err
		}
		r.blame(t)
		return putEnded(r)(tx)
	}
}

// joinBlame has a record say what is written apart from it. What cannot be read
// was something: it counts from the beginning.
func (l *ledger) joinBlame(tx *bbolt.Tx, r *record) {
	raw := tx.Bucket(bucketBlame).Get([]byte(r.ID))
	if raw == nil {
		return
	}
	bl, err := decodeBlame(raw)
	if err != nil {
		l.log.Error("blame cannot be read", "sandbox", r.ID, "err", err)
		bl = &dsec.Blame{Cause: dsec.CauseInfraImage, Since: r.Created, Evidence: []string{"what it is blamed on cannot be read"}}
	}
	r.Blame = bl
	r.Result = r.verdict(r.Result)
}
