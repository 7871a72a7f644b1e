package layer

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
)

const digestPrefix = "sha256:"

// ParseDigest accepts exactly "sha256:" and 64 lower-case hex digits. It stands
// between everything from outside and every use of a digest as a name.
func ParseDigest(s string) (Digest, error) {
	h, ok := strings.CutPrefix(s, digestPrefix)
	if !ok || len(h) != 2*sha256.Size || strings.Trim(h, "0123456789abcdef") != "" {
		return "", dsec.Errorf(dsec.Invalid, "parse digest", dsec.Quote(s), "want sha256: and 64 hex digits")
	}
	return Digest(s), nil
}

// DigestOf names bytes.
func DigestOf(b []byte) Digest {
	sum := sha256.Sum256(b)
	return FromSum(sum[:])
}

// FromSum turns a finished SHA-256 into a digest.
func FromSum(sum []byte) Digest { return Digest(digestPrefix + hex.EncodeToString(sum)) }

// Hex is the digest without its prefix, fit for a file name.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), digestPrefix) }

// sum is the bytes of a valid digest.
func (d Digest) sum() ([]byte, error) {
	if _, err := ParseDigest(string(d)); err != nil {
		return nil, err
	}
	return hex.DecodeString(d.Hex())
}

var tagPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}$`)

// CheckTag says whether a name can be a tag.
func CheckTag(tag string) error {
	if !tagPattern.MatchString(tag) || strings.HasPrefix(tag, digestPrefix) {
		return dsec.Errorf(dsec.Invalid, "read tag", dsec.Quote(tag), "want letters, digits and ._/:@+-, at most 128, not a digest")
	}
	return nil
}

// Sum is the SHA-256 that a valid digest names.
func (d Digest) Sum() (sum [sha256.Size]byte) {
	_, _ = hex.Decode(sum[:], []byte(d.Hex())) // of one that is not valid it is some other
	return sum
}
