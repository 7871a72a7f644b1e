package image

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// ratioSlack is what may be decompressed before the ratio counts: a tar of
// zeros is legitimate while it is small.
const ratioSlack = 64 << 20

// decompress sniffs the compression by content; what people call it is not
// asked. It refuses streams that grow by more than maxRatio.
func decompress(r io.Reader, maxRatio int64) (io.ReadCloser, error) {
	in := &counter{r: r}
	br := bufio.NewReaderSize(in, 1<<16)
	head, err := br.Peek(6)
	if err != nil && err != io.EOF {
		return nil, err
	}
	var out io.ReadCloser
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		out, err = gzip.NewReader(br)
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}), len(head) > 3 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		var d *zstd.Decoder
		d, err = zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
		if err == nil {
			out = d.IOReadCloser()
		}
	case bytes.HasPrefix(head, []byte("BZh")):
		out = io.NopCloser(bzip2.NewReader(br))
	case bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		return nil, errors.New("xz compression: not supported, use zstd or gzip")
	default:
		return io.NopCloser(br), nil
	}
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	return &ratioReader{ReadCloser: out, in: in, max: maxRatio}, nil
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

type ratioReader struct {
	io.ReadCloser
	in  *counter
	out int64
	max int64
	err error // what a read said
}

func (r *ratioReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.out += int64(n)
	if r.out > ratioSlack && r.out-ratioSlack > r.in.n*r.max {
		n, err = 0, fmt.Errorf("decompress: %d bytes from %d, more than %d times as many", r.out, r.in.n, r.max)
	}
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

// Close does not say again what a read has said: decompressors do.
func (r *ratioReader) Close() error {
	if err := r.ReadCloser.Close(); r.err == nil {
		return err
	}
	return nil
}
