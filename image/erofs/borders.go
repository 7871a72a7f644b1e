package erofs

import "slices"

// Borders lists where parts of files that are contiguous in the data file, and
// with their last block not smaller than least, begin and end there: bytes,
// ascending, each once.
func (im *Image) Borders(least int64) ([]int64, error) {
	var borders []int64
	err := im.Walk(func(_ string, n *Node) error {
		if n.Mode&TypeMask != TypeRegular || n.Size <= least-BlockSize {
			return nil
		}
		runs, err := n.Runs()
		for _, r := range runs {
			if size := int64(r.Count) * BlockSize; size >= least {
				at := int64(r.Block) * BlockSize
				borders = append(borders, at, at+size)
			}
		}
		return err
	})
	slices.Sort(borders)
	return slices.Compact(borders), err
}
