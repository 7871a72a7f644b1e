package nodeapi

import (
	"math"
	"net/http"
	"net/url"
	"strconv"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/api/wire"
)

// query reads the parameters of a raw request; the first bad one is its err.
type query struct {
	v   url.Values
	err error
}

// parameters of a raw request.
func parameters(r *http.Request) query {
	q := query{v: r.URL.Query()}
	q.err = wire.CheckQuery(q.v)
	return q
}

// number in a base, def if it is not given; the bounds are included.
func (q *query) number(name string, def int64, base int, least, most int64) int64 {
	s := q.v.Get(name)
	if s == "" {
		return def
	}
	n, err := strconv.ParseInt(s, base, 64)
	if (err != nil || n < least || n > most) && q.err == nil {
		q.err = dsec.Errorf(dsec.Invalid, "parse parameter", name, "%s is no number from %d to %d", dsec.Quote(s), least, most)
	}
	return n
}

// offset of a stream of bytes.
func (q *query) offset(name string, def, least int64) int64 {
	return q.number(name, def, 10, least, wire.MaxOffset)
}

// id of a user or group; the last of the kernel's numbers means none.
func (q *query) id(name string) *uint32 { return q.small(name, 10, math.MaxUint32-1) }

func (q *query) mode(name string) *uint32 { return q.small(name, 8, 0o7777) }

func (q *query) small(name string, base int, most int64) *uint32 {
	if q.v.Get(name) == "" {
		return nil
	}
	v := uint32(q.number(name, 0, base, 0, most))
	return &v
}

func (q *query) flag(name string) bool {
	b := q.v.Get(name)
	return b == "1" || b == "true"
}
