package image

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/opendsec/dsec"
)

func newHash() hash.Hash { return sha256.New() }

// verify returns a reader that ends in io.EOF only if what it read has the
// digest and size, and that never returns more than size bytes.
func verify(r io.Reader, want v1.Hash, size int64) io.Reader {
	return &verifier{r: r, hash: newHash(), want: want, left: size, size: size}
}

type verifier struct {
	r          io.Reader
	hash       hash.Hash
	want       v1.Hash
	left, size int64
	err        error // the final answer, once there is one
}

func (v *verifier) Read(p []byte) (int, error) {
	if v.err != nil {
		return 0, v.err
	}
	// One byte more than expected tells whether there is more.
	n, err := v.r.Read(p[:min(int64(len(p)), v.left+1)])
	if int64(n) > v.left {
		v.err = v.corrupt("more than %d bytes", v.size)
		return 0, v.err
	}
	v.left -= int64(n)
	v.hash.Write(p[:n])
	if err == io.EOF {
		err = v.end()
	}
	v.err = err
	return n, err
}

func (v *verifier) end() error {
	if v.left > 0 {
		return v.corrupt("%d of %d bytes", v.size-v.left, v.size)
	}
	if got := hex.EncodeToString(v.hash.Sum(nil)); got != v.want.Hex {
		return v.corrupt("content has digest sha256:%s", got)
	}
	return io.EOF
}

func (v *verifier) corrupt(format string, args ...any) error {
	return dsec.Errorf(dsec.Corrupt, "read blob", v.want.String(), format, args...)
}
