package meter

import (
	"errors"
	"fmt"
	"slices"
)

// What a module may have that its engine does not bound, or bounds by gigabytes.
const (
	MaxFunctions    = 200_000
	MaxTables       = 4
	MaxTableEntries = 1 << 20 // of each; 8 bytes in the engine
)

// Bound returns the module with tables that cannot grow to more than they may, and how many
// functions it has. It is an error if it has more of either, imports anything but functions, or
// starts with one that it imports: the engine would run that as if nobody had called it.
func Bound(b []byte) (_ []byte, functions int, err error) {
	m, err := split(b)
	if err == nil {
		err = m.count()
	}
	if err != nil {
		return nil, 0, err
	}
	switch {
	case m.others > 0:
		return nil, 0, errors.New("imports: there are functions only")
	case m.funcs > MaxFunctions:
		return nil, 0, fmt.Errorf("it has %d functions, at most %d", m.funcs, MaxFunctions)
	}
	if at, ok, err := m.start(); err != nil || ok && at < m.imported {
		return nil, 0, errors.New("start: it names no function of the module's own")
	}
	if err := m.boundTables(); err != nil {
		return nil, 0, err
	}
	return m.join(), int(m.funcs), nil
}

func (m *module) boundTables() error {
	i, ok := m.find(idTable)
	if !ok {
		return nil
	}
	n, r := m.items(idTable)
	if n > MaxTables {
		return fmt.Errorf("it has %d tables, at most %d", n, MaxTables)
	}
	body := unsigned(nil, n)
	for range n {
		kind := r.byte()
		flags, least := r.byte(), r.u32()
		most := uint64(MaxTableEntries)
		if flags == 1 {
			most = min(most, r.u32())
		}
		switch {
		case r.err != nil:
			return fmt.Errorf("tables: %w", r.err)
		case flags > 1 || !isValueType(kind):
			return errors.New("tables: a kind that is not known")
		case least > MaxTableEntries:
			return fmt.Errorf("a table of %d entries, at most %d", least, MaxTableEntries)
		}
		body = unsigned(unsigned(append(body, kind, 1), least), max(least, most))
	}
	if len(r.rest()) > 0 {
		return errors.New("tables: there is more than it says")
	}
	m.sections[i].body = body
	return nil
}

// join puts a module together again.
func (m *module) join() []byte {
	out := slices.Clone([]byte(header))
	for _, s := range m.sections {
		out = unsigned(append(out, s.id), uint64(len(s.body)))
		out = append(out, s.body...)
	}
	return out
}
