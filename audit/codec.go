package audit

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"strings"
	"unicode/utf8"

	"github.com/opendsec/dsec"
)

// magic begins each segment; its last byte is the version.
const magic = "dsecaud1"

const (
	frameHeader = 8        // length and checksum
	maxFrame    = 64 << 10 // of the payload
)

// errTorn: what follows was not written to its end.
var errTorn = errors.New("the record is not whole")

var table = crc32.MakeTable(crc32.Castagnoli)

// appendFrame adds one record in the form of the disk.
func appendFrame(b []byte, r *dsec.AuditRecord) ([]byte, error) {
	payload, err := json.Marshal(r)
	if err != nil {
		return b, err
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(payload, table))
	return append(b, payload...), nil
}

// decodeFrame reads the first record of b and says how many bytes it takes.
func decodeFrame(b []byte) (r dsec.AuditRecord, n int, err error) {
	if len(b) < frameHeader {
		return r, 0, errTorn
	}
	size := binary.LittleEndian.Uint32(b)
	if size == 0 || size > maxFrame || int(size) > len(b)-frameHeader {
		return r, 0, errTorn
	}
	payload := b[frameHeader : frameHeader+int(size)]
	if crc32.Checksum(payload, table) != binary.LittleEndian.Uint32(b[4:]) {
		return r, 0, errTorn
	}
	if err := json.Unmarshal(payload, &r); err != nil {
		return r, 0, errTorn
	}
	return r, frameHeader + int(size), nil
}

// cut bounds a record and makes its texts UTF-8.
func cut(r *dsec.AuditRecord) {
	for _, s := range []*string{&r.Exe, &r.Path, &r.Detail} {
		*s = cutText(*s, dsec.MaxAuditText)
	}
	for _, s := range []*string{&r.Exec, &r.Phase} {
		*s = cutText(*s, dsec.MaxNameBytes)
	}
	r.Args = CutArgs(r.Args)
}

// CutArgs keeps what of arguments goes into a record.
func CutArgs(args []string) []string {
	var out []string
	room := dsec.MaxAuditArgBytes
	for i, a := range args {
		if i == dsec.MaxAuditArgs || room <= 0 {
			return append(out, "…")
		}
		a = cutText(a, room)
		room -= len(a)
		out = append(out, a)
	}
	return out
}

func cutText(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most] + "…"
}
