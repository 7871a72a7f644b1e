package files

import (
	"context"
	"io"

	"golang.org/x/sys/unix"
)

// Read implements FS.
func (l *Local) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	if err := check(ctx, opRead, path); err != nil {
		return 0, err
	}
	if offset < 0 {
		return 0, invalid(opRead, path, "offset %d", offset)
	}
	f, _, err := l.openRegular(opRead, path, unix.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	buf, done := l.buffer()
	defer done()
	var total int64
	for length < 0 || total < length {
		if err := ctx.Err(); err != nil {
			return total, fail(opRead, path, err)
		}
		piece := buf
		if length >= 0 && length-total < int64(len(piece)) {
			piece = piece[:length-total]
		}
		n, err := f.ReadAt(piece, offset+total)
		if n > 0 {
			written, werr := w.Write(piece[:n])
			total += int64(written)
			if werr != nil {
				return total, failPeer(opRead, path, werr)
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return total, fail(opRead, path, errno(err))
		}
	}
	return total, nil
}
