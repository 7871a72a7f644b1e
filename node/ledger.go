package node

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/fault"
)

// ledgerVersion is of the layout of the file, see docs/formats/ledger.md.
const ledgerVersion = 1

// The buckets.
var (
	bucketMeta    = []byte("meta")     // "version", "clean"
	bucketLive    = []byte("live")     // id → record
	bucketEnded   = []byte("ended")    // id → record
	bucketEndedAt = []byte("ended_at") // time, id → nothing
	bucketBlame   = []byte("blame")    // id → blame of a record of live
	bucketCalls   = []byte("calls")    // scope, call id → call
	bucketCallsAt = []byte("calls_at") // time, key of calls → nothing
)

const maxBatch = 256 // changes in one commit

// change is done in a transaction together with others.
type change struct {
	do   []op
	done chan error // capacity 1
}

// ledger is the durable truth of the node. Changes of many callers share one
// commit: a change is on disk when commit returns.
type ledger struct {
	db      *bbolt.DB
	changes chan change
	stop    chan struct{}
	writer  sync.WaitGroup
	metrics *Metrics
	log     *slog.Logger

	clock      func() time.Time
	alive      time.Time // of the last change that an earlier agent made; zero: there was none
	unreadable sync.Map  // ids of records that were passed over

	mu     sync.RWMutex // closed, against senders
	closed bool
}

func openLedger(dir string, m *Metrics, log *slog.Logger, clock func() time.Time) (*ledger, error) {
	path := filepath.Join(dir, "ledger.db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: 2 * time.Second, FreelistType: bbolt.FreelistMapType})
	if errors.Is(err, berrors.ErrTimeout) {
		return nil, dsec.Errorf(dsec.Unavailable, "open ledger", path, "another agent has it open")
	}
	if err != nil {
		return nil, dsec.E(ledgerClass(err), "open ledger", path, err)
	}
	l := &ledger{db: db, changes: make(chan change, maxBatch), stop: make(chan struct{}), metrics: m, log: log, clock: clock}
	if err := l.init(path); err != nil {
		_ = db.Close() // the first error counts
		return nil, err
	}
	l.writer.Go(l.write)
	return l, nil
}

func (l *ledger) init(path string) error {
	var version byte
	err := l.db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketLive, bucketEnded, bucketEndedAt, bucketBlame, bucketCalls, bucketCallsAt} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		meta := tx.Bucket(bucketMeta)
		if v := meta.Get([]byte("version")); len(v) > 0 {
			version = v[0]
			if at := meta.Get([]byte("alive")); len(at) == 8 {
				l.alive = time.Unix(0, int64(binary.BigEndian.Uint64(at))).UTC()
			}
			return nil
		}
		version = ledgerVersion
		return meta.Put([]byte("version"), []byte{ledgerVersion})
	})
	if err != nil {
		return dsec.E(ledgerClass(err), "open ledger", path, err)
	}
	if version != ledgerVersion {
		return dsec.Errorf(dsec.Corrupt, "open ledger", path, "version %d, this program reads %d", version, ledgerVersion)
	}
	return nil
}

func ledgerClass(err error) dsec.Class {
	for _, e := range []error{berrors.ErrInvalid, berrors.ErrChecksum, berrors.ErrVersionMismatch} {
		if errors.Is(err, e) {
			return dsec.Corrupt
		}
	}
	return fault.Class(err, dsec.Internal)
}

// write commits whatever has gathered while the last commit was at work.
func (l *ledger) write() {
	for {
		var batch []change
		select {
		case c := <-l.changes:
			batch = append(batch, c)
		case <-l.stop:
			return
		}
		for len(batch) < maxBatch && len(l.changes) > 0 {
			batch = append(batch, <-l.changes)
		}
		err := l.commitBatch(batch)
		for i, c := range batch {
			if err != nil && len(batch) > 1 { // one that cannot be written fails only itself
				c.done <- l.commitBatch(batch[i : i+1])
				continue
			}
			c.done <- err
		}
	}
}

func (l *ledger) commitBatch(batch []change) error {
	began := time.Now()
	defer func() { l.metrics.commit(time.Since(began), len(batch)) }()
	if err := failpoint.Hit(context.Background(), "node.ledger.commit"); err != nil {
		return err
	}
	err := l.db.Update(func(tx *bbolt.Tx) error {
		for _, c := range batch {
			for _, do := range c.do {
				if err := do(tx); err != nil {
					return err
				}
			}
		}
		return tx.Bucket(bucketMeta).Put([]byte("alive"), atKey(l.clock(), nil))
	})
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	if err != nil {
		return dsec.E(ledgerClass(err), "write ledger", "", err)
	}
	return nil
}

// commit makes a change durable. It does not end with a context: a change that
// was handed over happens, and its caller has to know.
func (l *ledger) commit(do ...op) error {
	c := change{do: do, done: make(chan error, 1)}
	l.mu.RLock()
	if l.closed {
		l.mu.RUnlock()
		return dsec.Errorf(dsec.Unavailable, "write ledger", "", "the node is closed")
	}
	l.changes <- c
	l.mu.RUnlock()
	return <-c.done
}

// close commits what was handed over and closes the file.
func (l *ledger) close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	l.mu.Unlock()
	l.flushRest()
	close(l.stop)
	l.writer.Wait()
	if err := l.db.Close(); err != nil {
		return dsec.E(dsec.Internal, "close ledger", "", err)
	}
	return nil
}

// flushRest waits until the writer has done all that came before.
func (l *ledger) flushRest() {
	c := change{done: make(chan error, 1)}
	l.changes <- c
	<-c.done
}

// call is a mutating call that succeeded.
type call struct {
	Verb   string    `json:"verb"`
	Hash   string    `json:"hash"` // of its parameters
	Answer string    `json:"answer"`
	At     time.Time `json:"at"`
}

// callKey scopes a call id.
func callKey(scope, id string) []byte {
	b := binary.AppendUvarint(nil, uint64(len(scope)))
	return append(append(b, scope...), id...)
}

func atKey(t time.Time, key []byte) []byte {
	return append(binary.BigEndian.AppendUint64(nil, uint64(max(0, t.UnixNano()))), key...)
}

// op is one part of a change. What it writes was encoded when it was made, but
// for putBlame and bury.
type op func(tx *bbolt.Tx) error

func putLive(r *record) op {
	key := []byte(r.ID)
	b, err := r.write()
	return func(tx *bbolt.Tx) error {
		if err != nil {
			return err
		}
		return tx.Bucket(bucketLive).Put(key, b)
	}
}

// putEnded moves a record to those of ended sandboxes.
func putEnded(r *record) op {
	key, at := []byte(r.ID), atKey(r.Changed, []byte(r.ID))
	b, err := r.write()
	return func(tx *bbolt.Tx) error {
		if err != nil {
			return err
		}
		for _, from := range [][]byte{bucketLive, bucketBlame} {
			if err := tx.Bucket(from).Delete(key); err != nil {
				return err
			}
		}
		if err := tx.Bucket(bucketEndedAt).Put(at, nil); err != nil {
			return err
		}
		return tx.Bucket(bucketEnded).Put(key, b)
	}
}

// putCall remembers a call that succeeded.
func putCall(key []byte, c call) op {
	at := atKey(c.At, key)
	return func(tx *bbolt.Tx) error {
		b, err := json.Marshal(c)
		if err != nil {
			return err
		}
		if err := tx.Bucket(bucketCallsAt).Put(at, nil); err != nil {
			return err
		}
		return tx.Bucket(bucketCalls).Put(key, b)
	}
}

// findCall returns nil if the call is unknown.
func (l *ledger) findCall(key []byte) (*call, error) {
	var c *call
	err := l.db.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketCalls).Get(key)
		if b == nil {
			return nil
		}
		c = &call{}
		return json.Unmarshal(b, c)
	})
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, "read ledger", "call", err)
	}
	return c, nil
}

// ended returns the record of an ended sandbox, nil if there is none.
func (l *ledger) ended(id dsec.SandboxID) (r *record, err error) {
	err = l.db.View(func(tx *bbolt.Tx) error {
		if b := tx.Bucket(bucketEnded).Get([]byte(id)); b != nil {
			r, err = decodeRecord(b)
		}
		return err
	})
	return r, err
}

// eachEnded calls fn with the records that ended at or after since, oldest
// first, until it returns false. One that cannot be read is passed over: it must
// not hide the others.
func (l *ledger) eachEnded(since time.Time, fn func(*record) bool) error {
	return l.db.View(func(tx *bbolt.Tx) error {
		ended := tx.Bucket(bucketEnded)
		cur := tx.Bucket(bucketEndedAt).Cursor()
		for k, _ := cur.Seek(atKey(since, nil)); k != nil; k, _ = cur.Next() {
			r := l.read(k[8:], ended.Get(k[8:]))
			if r != nil && !fn(r) {
				return nil
			}
		}
		return nil
	})
}

// live returns every record of a sandbox that is not deleted, but those that
// cannot be read.
func (l *ledger) live() (out []*record, err error) {
	err = l.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketLive).ForEach(func(id, b []byte) error {
			if r := l.read(id, b); r != nil {
				l.joinBlame(tx, r)
				out = append(out, r)
			}
			return nil
		})
	})
	return out, err
}

// prune forgets calls older than a day, records older than keep.Age, and the
// oldest records beyond keep.Bytes.
func (l *ledger) prune(now time.Time, keep Retention) error {
	return l.commit(func(tx *bbolt.Tx) error {
		if err := pruneCalls(tx, now.Add(-callsKept)); err != nil {
			return err
		}
		var total int64
		ended := tx.Bucket(bucketEnded)
		err := ended.ForEach(func(_, v []byte) error { total += int64(len(v)); return nil })
		if err != nil {
			return err
		}
		limit := atKey(now.Add(-keep.Age), nil)
		cur := tx.Bucket(bucketEndedAt).Cursor()
		for k, _ := cur.First(); k != nil && (total > keep.Bytes || string(k) < string(limit)); k, _ = cur.First() {
			total -= int64(len(ended.Get(k[8:])))
			if err := ended.Delete(k[8:]); err != nil {
				return err
			}
			if err := cur.Delete(); err != nil {
				return err
			}
		}
		return nil
	})
}

// callsKept is how long a call is remembered.
const callsKept = 24 * time.Hour

func pruneCalls(tx *bbolt.Tx, before time.Time) error {
	limit := string(atKey(before, nil))
	cur := tx.Bucket(bucketCallsAt).Cursor()
	calls := tx.Bucket(bucketCalls)
	for k, _ := cur.First(); k != nil && string(k) < limit; k, _ = cur.First() {
		var c call
		if b := calls.Get(k[8:]); b != nil && json.Unmarshal(b, &c) == nil && string(atKey(c.At, nil)) < limit {
			if err := calls.Delete(k[8:]); err != nil { // not one that was made again since
				return err
			}
		}
		if err := cur.Delete(); err != nil {
			return err
		}
	}
	return nil
}

// takeClean reports whether the last agent closed the ledger in order, and
// marks it as in use.
func (l *ledger) takeClean() (clean bool, err error) {
	err = l.commit(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		clean = meta.Get([]byte("clean")) != nil
		return meta.Delete([]byte("clean"))
	})
	return clean, err
}

// dropCall forgets a call that was undone after all. key may be nil.
func dropCall(key []byte) op {
	return func(tx *bbolt.Tx) error { return tx.Bucket(bucketCalls).Delete(key) }
}

func putClean(tx *bbolt.Tx) error { return tx.Bucket(bucketMeta).Put([]byte("clean"), []byte{1}) }
