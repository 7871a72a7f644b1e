package snapshot

import "bytes"

// How far around an anchor what it belongs to may reach, in bytes.
const (
	before = 64
	reach  = 512
)

// around calls fn for what is around the anchors in a text, in order, until it
// returns true. Windows that touch are one: altogether they are no longer than
// the text, whatever the text is. behind is how far one reaches, 0 is reach.
func around(b []byte, anchors []string, behind int, fn func(from, to int) bool) {
	if behind == 0 {
		behind = reach
	}
	f := finder{b: b, anchors: anchors, at: make([]int, len(anchors))}
	for next := f.next(0); next < len(b); {
		from, to := max(next-before, 0), 0
		for next < len(b) && next-before <= max(to, from) {
			to = min(next+behind, len(b))
			next = f.next(next + 1)
		}
		if fn(from, to) {
			return
		}
	}
}

// finder finds the first of several anchors, and looks at no byte twice for one.
type finder struct {
	b       []byte
	anchors []string
	at      []int // of each anchor: where it is next, plus one; 0: not looked for
}

// next is where an anchor is from an offset on; the end of the text if none is.
func (f *finder) next(from int) int {
	first := len(f.b)
	for i, a := range f.anchors {
		if f.at[i] <= from {
			f.at[i] = len(f.b) + 1
			if k := bytes.Index(f.b[from:], []byte(a)); k >= 0 {
				f.at[i] = from + k + 1
			}
		}
		first = min(first, f.at[i]-1)
	}
	return first
}

// lower is a text with its ASCII letters small, byte for byte.
func lower(b []byte) []byte {
	out := make([]byte, len(b))
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		out[i] = c
	}
	return out
}

// addressAt is where scheme://user:password@host begins, -1 if nowhere. It is no
// expression: one would have to try every letter as the beginning of a scheme.
func addressAt(b []byte) int {
	const sep, ends = "://", "/'\"<> \t\n\v\f\r"
	for from := 0; ; {
		i := bytes.Index(b[from:], []byte(sep))
		if i < 0 {
			return -1
		}
		scheme := schemeBefore(b[:from+i])
		from += i + len(sep)
		end := len(b)
		if k := bytes.IndexAny(b[from:], ends); k >= 0 {
			end = from + k
		}
		user, rest, _ := bytes.Cut(b[from:end], []byte(":"))
		password, host, ok := bytes.Cut(rest, []byte("@"))
		ok = ok && scheme >= 0 && len(password) >= 3 && !bytes.ContainsAny(password, ":$%{") && bytes.IndexByte(user, '@') < 0
		// The host may be left out where a path follows.
		if ok && (len(host) > 0 || end < len(b) && bytes.IndexByte([]byte("/<>"), b[end]) >= 0) {
			return scheme
		}
		from = max(from, end-1) // the colon before a slash may be of the next one
	}
}

// schemeBefore is where the scheme that a text ends with begins, -1 if it does not.
func schemeBefore(b []byte) int {
	at := -1
	for i := len(b) - 1; i >= max(len(b)-before, 0); i-- {
		switch c := b[i]; {
		case 'a' <= c && c <= 'z':
			at = i
		case '0' <= c && c <= '9', c == '+', c == '.', c == '-':
		default:
			return at
		}
	}
	return at
}
