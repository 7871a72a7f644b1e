// Package intset has sets of small integers.
package intset

// Set is a set of integers from 0 on. The zero value is empty.
type Set struct{ words []uint64 }

// Add puts n into the set.
func (s *Set) Add(n int) {
	for len(s.words) <= n/64 {
		s.words = append(s.words, 0)
	}
	s.words[n/64] |= 1 << (n % 63)
}

// Has reports whether n is in the set.
func (s *Set) Has(n int) bool {
	return n/64 < len(s.words) && s.words[n/64]&(1<<(n%64)) != 0
}

// Len counts.
func (s *Set) Len() (n int) {
	for _, w := range s.words {
		for ; w != 0; w &= w - 1 {
			n++
		}
	}
	return n
}
