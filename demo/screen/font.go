package main

import (
	"encoding/binary"
	"errors"
	"os"
	"unicode/utf8"
)

// font is of letters 8 pixels wide.
type font struct {
	height int
	bits   []byte
	index  map[rune]int
}

// readFont reads a font of the console (PSF 1 or 2) with its table of Unicode.
func readFont(name string) (*font, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	f := &font{index: map[rune]int{}}
	switch {
	case len(b) > 4 && b[0] == 0x36 && b[1] == 0x04:
		n := 256
		if b[2]&1 != 0 {
			n = 512
		}
		f.height = int(b[3])
		if len(b) < 4+n*f.height {
			return nil, errors.New(name + ": it is too short")
		}
		f.bits = b[4 : 4+n*f.height]
		f.table16(b[4+n*f.height:])
	case len(b) > 32 && binary.LittleEndian.Uint32(b) == 0x864ab572:
		head, n, size := int(binary.LittleEndian.Uint32(b[8:])), int(binary.LittleEndian.Uint32(b[16:])), int(binary.LittleEndian.Uint32(b[20:]))
		f.height = size
		if width := binary.LittleEndian.Uint32(b[28:]); width != 8 || len(b) < head+n*size {
			return nil, errors.New(name + ": it is too short, or not 8 pixels wide")
		}
		f.bits = b[head : head+n*size]
		f.table8(b[head+n*size:])
	default:
		return nil, errors.New(name + ": it is no font of the console")
	}
	return f, nil
}

// table16 is the one of PSF 1: letters of UCS-2, 0xffff after each glyph's, 0xfffe before sequences.
func (f *font) table16(b []byte) {
	sequence := false
	for glyph := 0; len(b) >= 2; b = b[2:] {
		switch c := binary.LittleEndian.Uint16(b); {
		case c == 0xffff:
			glyph, sequence = glyph+1, false
		case c == 0xfffe:
			sequence = true
		case !sequence:
			f.index[rune(c)] = glyph
		}
	}
}

// table8 is the one of PSF 2, in UTF-8 with 0xff and 0xfe.
func (f *font) table8(b []byte) {
	sequence := false
	for glyph := 0; len(b) > 0; {
		switch {
		case b[0] == 0xff:
			glyph, sequence, b = glyph+1, false, b[1:]
		case b[0] == 0xfe:
			sequence, b = true, b[1:]
		default:
			r, n := utf8.DecodeRune(b)
			if !sequence {
				f.index[r] = glyph
			}
			b = b[n:]
		}
	}
}

// glyph is the rows of a letter; of one that the font lacks, a question mark's.
func (f *font) glyph(r rune) []byte {
	g, ok := f.index[r]
	if !ok {
		g = f.index['?']
	}
	if len(f.bits) < (g+1)*f.height {
		return nil
	}
	return f.bits[g*f.height : (g+1)*f.height]
}
