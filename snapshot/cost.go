package snapshot

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
)

// cost is what reading a disk has cost. Who made the disk says how large it
// seems; what it holds is bounded, so that is what the cost is compared with.
type cost struct {
	held  int64  // bytes that the files read so far take on the disk
	work  int64  // bytes read, and those of holes that were hashed
	first uint64 // block of the data file at which this reading began
}

// A disk may cost some times what it holds, because files are read once more
// when they change, and pieces are padded; a small one anything up to slack.
const (
	costFactor = 8
	costSlack  = 1 << 30
)

// contents is a regular file whose reading is counted.
func (p *packer) contents(f *os.File, st *unix.Stat_t) *contents {
	p.held += max(st.Blocks*512, min(st.Size, 64<<10))
	return &contents{f: f, size: st.Size, spend: p.spend}
}

// spend counts what is about to be read or hashed, and ends the pack if it was
// given up or has cost too much. The holes of a large file are kept in large
// units: one made of nothing but small pieces far apart must not fill the disk
// of who packs it.
func (p *packer) spend(n int64) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	most := costFactor*p.held + costSlack
	if made := int64(p.data.Blocks()-p.first) * erofs.BlockSize; made > most {
		return bad("data scattered so widely that the layer would take %d bytes and more", made)
	}
	switch p.work += n; {
	case p.work > most:
		return bad("%d bytes and more to be read of files that hold %d", p.work, p.held)
	case p.work > p.opts.MaxBytes:
		return bad("more than %d bytes to be read", p.opts.MaxBytes)
	}
	return nil
}
