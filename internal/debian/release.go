package debian

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
	"github.com/ProtonMail/go-crypto/openpgp/packet"

	"github.com/opendsec/dsec"
)

// promise is what a signed list says of a file.
type promise struct {
	sum  string // SHA-256, hex
	size int64
}

// release is a verified and parsed InRelease.
type release struct {
	suite, codename  string
	date, validUntil time.Time // validUntil is zero where it is not limited
	byHash           bool
	files            map[string]promise
}

// readKeyring reads public keys, armored or not.
func readKeyring(name string) (openpgp.EntityList, error) {
	text, err := readCapped(name, maxSources)
	if err != nil {
		class := dsec.Invalid
		if os.IsNotExist(err) {
			class = dsec.NotFound
		}
		return nil, dsec.E(class, "read keyring", name, err)
	}
	read := openpgp.ReadKeyRing
	if bytes.HasPrefix(text, []byte("-----BEGIN")) {
		read = openpgp.ReadArmoredKeyRing
	}
	keys, err := read(bytes.NewReader(text))
	if err != nil {
		return nil, dsec.E(dsec.Invalid, "read keyring", name, err)
	}
	return keys, nil
}

// verifyRelease returns the signed text of an InRelease. One good signature of
// a key in the ring is enough: Debian signs with the keys of two releases.
// Text outside of what is signed is refused, not skipped.
func verifyRelease(text []byte, keys openpgp.EntityList, object string, now time.Time) ([]byte, error) {
	const op = "verify signature of"
	if !bytes.HasPrefix(text, []byte("-----BEGIN PGP SIGNED MESSAGE-----")) {
		return nil, dsec.Errorf(dsec.PermissionDenied, op, object, "it is not signed")
	}
	block, rest := clearsign.Decode(text)
	if block == nil || len(bytes.TrimSpace(rest)) != 0 {
		return nil, dsec.Errorf(dsec.PermissionDenied, op, object, "not exactly one signed message")
	}
	packets := packet.NewReader(io.LimitReader(block.ArmoredSignature.Body, maxSources))
	cause := errors.New("no signature")
	for range 16 {
		p, err := packets.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			cause = err
			break
		}
		sig, ok := p.(*packet.Signature)
		if !ok {
			continue
		}
		var one bytes.Buffer
		if err = sig.Serialize(&one); err == nil {
			_, err = openpgp.CheckDetachedSignature(keys, bytes.NewReader(block.Bytes), &one,
				&packet.Config{Time: func() time.Time { return now }})
		}
		if err == nil {
			return block.Plaintext, nil
		}
		cause = err
	}
	return nil, dsec.E(dsec.PermissionDenied, op, object, cause)
}

// parseRelease reads the text that verifyRelease returned.
func parseRelease(text []byte, object string) (*release, error) {
	const op = "parse"
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, refuse(op, object, "it is empty")
	}
	// It is one stanza, and longer than one of Packages may be.
	f, err := parseStanza(text, object)
	if err != nil {
		return nil, err
	}
	r := &release{suite: f["suite"], codename: f["codename"], byHash: strings.EqualFold(f["acquire-by-hash"], "yes"), files: map[string]promise{}}
	if r.date, err = parseDate(f["date"]); err != nil {
		return nil, refuse(op, object, "field Date: %w", err)
	}
	if v := f["valid-until"]; v != "" {
		if r.validUntil, err = parseDate(v); err != nil {
			return nil, refuse(op, object, "field Valid-Until: %w", err)
		}
	}
	for line := range strings.Lines(f["sha256"]) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if len(words) != 3 {
			return nil, refuse(op, object, "field SHA256: %s", dsec.Quote(strings.TrimSpace(line)))
		}
		p, err := parsePromise(words[0], words[1])
		if err != nil || !localPath(words[2]) {
			return nil, refuse(op, object, "field SHA256: %s", dsec.Quote(strings.TrimSpace(line)))
		}
		r.files[words[2]] = p
	}
	return r, nil
}

func parseDate(s string) (time.Time, error) {
	t, err := time.Parse(time.RFC1123, s)
	if err != nil {
		// Days of one digit are allowed without a zero.
		t, err = time.Parse("Mon, 2 Jan 2006 15:04:05 MST", s)
	}
	return t, err
}

func parsePromise(sum, size string) (promise, error) {
	if b, err := hex.DecodeString(sum); err != nil || len(b) != 32 {
		return promise{}, errors.New("not a SHA-256")
	}
	n, err := strconv.ParseInt(size, 10, 64)
	if err != nil || n < 0 {
		return promise{}, errors.New("not a size")
	}
	return promise{strings.ToLower(sum), n}, nil
}

// localPath reports whether a path of an archive stays in it, in every
// reader's eyes.
func localPath(p string) bool {
	return p != "" && p != "." && p != ".." && p[0] != '/' && path.Clean(p) == p && !strings.HasPrefix(p, "../") &&
		!strings.ContainsAny(p, "\x00\\?#%")
}

// judge refuses a release that is not the one that was asked for, or not of now.
func (r *release) judge(suite, object string, now time.Time, allowExpired bool) error {
	if suite != r.codename && suite != r.suite {
		return refuse("check", object, "it is of suite %s (%s), not of %s", dsec.Quote(r.suite), dsec.Quote(r.codename), dsec.Quote(suite))
	}
	if !allowExpired && !r.validUntil.IsZero() && now.After(r.validUntil) {
		return refuse("check", object, "it was valid until %s: the mirror does not follow its archive, or this clock is wrong", r.validUntil.Format(time.RFC3339))
	}
	return nil
}
