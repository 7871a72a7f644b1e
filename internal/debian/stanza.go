package debian

import (
	"bufio"
	"bytes"
	"io"
	"strings"

	"github.com/opendsec/dsec"
)

// fields of one stanza, by name in lower case. Lines that continue one are
// joined by newlines, without the space they begin with.
type fields map[string]string

// eachStanza calls fn with the text of each stanza of a file of Debian's
// control format; the text is valid until fn returns.
func eachStanza(r io.Reader, object string, fn func(text []byte) error) error {
	br := bufio.NewReaderSize(r, 1<<16)
	var text []byte
	flush := func() error {
		if len(text) == 0 {
			return nil
		}
		err := fn(text)
		text = text[:0]
		return err
	}
	for {
		line, err := br.ReadSlice('\n')
		if err != nil && err != io.EOF && err != bufio.ErrBufferFull {
			return err
		}
		// An empty line ends a stanza; the rest of a line that is longer than the buffer is none.
		begins := len(text) == 0 || text[len(text)-1] == '\n'
		if begins && err != bufio.ErrBufferFull && len(bytes.TrimSpace(line)) == 0 {
			if err := flush(); err != nil {
				return err
			}
		} else {
			if len(text)+len(line) > maxStanza {
				return refuse("parse", object, "a stanza of more than %d bytes", maxStanza)
			}
			text = append(text, line...)
		}
		if err == io.EOF {
			return flush()
		}
	}
}

// parseStanza refuses what two readers could understand differently.
func parseStanza(text []byte, object string) (fields, error) {
	lines := map[string][]string{} // joined at the end: a field may have many
	last := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, " \t\r\n")
		switch {
		case strings.HasPrefix(line, "#"):
			continue
		case strings.HasPrefix(line, " "), strings.HasPrefix(line, "\t"):
			if last == "" {
				return nil, refuse("parse", object, "a line that continues nothing: %s", dsec.Quote(line))
			}
			lines[last] = append(lines[last], strings.TrimLeft(line, " \t"))
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || name == "" || strings.ContainsAny(name, " \t") {
			return nil, refuse("parse", object, "a line that is no field: %s", dsec.Quote(line))
		}
		last = strings.ToLower(name)
		if lines[last] != nil {
			return nil, refuse("parse", object, "field %s is there twice", name)
		}
		lines[last] = []string{strings.TrimSpace(value)}
	}
	f := make(fields, len(lines))
	for name, l := range lines {
		f[name] = strings.Join(l, "\n")
	}
	return f, nil
}
