// Package hello reads the first message of a TLS client, as far as it says whom
// the client asks for. It is pure, keeps nothing of what it is given, and accepts
// one reading only: what servers could understand in two ways is an error.
//
// It does not check a version, keys or ciphers: whoever is asked does.
package hello

import (
	"errors"
	"strings"

	"golang.org/x/crypto/cryptobyte"
)

// Max is the most bytes of a ClientHello with the headers of its records. Browsers
// send 2 KiB, with post-quantum keys.
const Max = 16 << 10

// Why a hello says no name that can be believed. ErrShort alone may pass with more
// bytes.
var (
	ErrShort     = errors.New("it is not complete")
	ErrNotTLS    = errors.New("it is not TLS")
	ErrMalformed = errors.New("its first message is malformed")
	ErrSize      = errors.New("its first message is too long")
	ErrNoName    = errors.New("it says no name")
	ErrEncrypted = errors.New("it encrypts the name (ECH)")
)

// Types and extensions of TLS.
const (
	recordHandshake  = 22
	clientHello      = 1
	extServerName    = 0
	extECH           = 0xfe0d
	extEncryptedSNI  = 0xffce // what was before ECH
	typeHostName     = 0
	headerOfRecord   = 5
	headerOfMessage  = 4
	maxRecord        = 1 << 14
	longestHostName  = 253
	longestSessionID = 32
)

// Name returns the name that a client asks for, in lower case without a last dot.
// What comes after its hello is not looked at.
func Name(b []byte) (string, error) {
	message, err := unwrap(b)
	if err != nil {
		return "", err
	}
	return nameIn(message)
}

// unwrap joins the parts of the message, which may be in several records.
func unwrap(b []byte) (message []byte, err error) {
	for read := 0; ; {
		if len(b) == 0 || b[0] == recordHandshake && len(b) < headerOfRecord {
			return nil, short(b, read)
		}
		if b[0] != recordHandshake || b[1] != 3 {
			return nil, ErrNotTLS
		}
		size := int(b[3])<<8 | int(b[4])
		if size == 0 || size > maxRecord {
			return nil, ErrMalformed
		}
		part := b[headerOfRecord:min(len(b), headerOfRecord+size)]
		message = append(message, part...)
		if len(message) > 0 && message[0] != clientHello {
			return nil, ErrMalformed
		}
		if len(message) >= headerOfMessage {
			whole := headerOfMessage + (int(message[1])<<16 | int(message[2])<<8 | int(message[3]))
			if whole > Max {
				return nil, ErrSize
			}
			if len(message) >= whole {
				return message[headerOfMessage:whole], nil
			}
		}
		read += headerOfRecord + len(part)
		if len(part) < size {
			return nil, short(nil, read)
		}
		b = b[headerOfRecord+size:]
	}
}

// short is of a message that may go on.
func short(rest []byte, read int) error {
	if read+len(rest) >= Max {
		return ErrSize
	}
	if len(rest) > 1 && rest[1] != 3 {
		return ErrNotTLS
	}
	return ErrShort
}

// nameIn reads a ClientHello.
func nameIn(message []byte) (name string, err error) {
	s := cryptobyte.String(message)
	var version uint16
	var session, ciphers, compressions, extensions cryptobyte.String
	if !s.ReadUint16(&version) || !s.Skip(32) || !s.ReadUint8LengthPrefixed(&session) || len(session) > longestSessionID ||
		!s.ReadUint16LengthPrefixed(&ciphers) || !s.ReadUint8LengthPrefixed(&compressions) {
		return "", ErrMalformed
	}
	if s.Empty() {
		return "", ErrNoName
	}
	if !s.ReadUint16LengthPrefixed(&extensions) || !s.Empty() {
		return "", ErrMalformed
	}
	seen := map[uint16]bool{}
	encrypted := false
	for !extensions.Empty() {
		var kind uint16
		var body cryptobyte.String
		if !extensions.ReadUint16(&kind) || !extensions.ReadUint16LengthPrefixed(&body) || seen[kind] {
			return "", ErrMalformed
		}
		seen[kind] = true
		switch kind {
		case extECH, extEncryptedSNI:
			encrypted = true
		case extServerName:
			if name, err = serverName(body); err != nil {
				return "", err
			}
		}
	}
	switch {
	case encrypted:
		return name, ErrEncrypted
	case name == "":
		return "", ErrNoName
	}
	return name, nil
}

// serverName reads the extension: one name of a host, of letters, digits, "-" and
// "_", which no server can take for another one.
func serverName(body cryptobyte.String) (string, error) {
	var list, host cryptobyte.String
	var kind uint8
	if !body.ReadUint16LengthPrefixed(&list) || !body.Empty() || !list.ReadUint8(&kind) || kind != typeHostName ||
		!list.ReadUint16LengthPrefixed(&host) || !list.Empty() {
		return "", ErrMalformed
	}
	return Host(string(host))
}

// Host is a name as it is compared: in lower case without a last dot. ErrMalformed
// if it has other than letters, digits, "-" and "_".
func Host(said string) (string, error) {
	name := strings.TrimSuffix(strings.ToLower(said), ".")
	if name == "" || len(name) > longestHostName {
		return "", ErrMalformed
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.ContainsFunc(label, unusual) {
			return "", ErrMalformed
		}
	}
	return name, nil
}

func unusual(r rune) bool {
	return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_'
}
