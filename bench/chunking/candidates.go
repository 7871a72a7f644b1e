package chunking

import (
	"fmt"
	"slices"
)

// Taken is the candidate that layers are cut by (layer.Cutter).
const Taken = "files+blocks 128"

// Candidate returns the one of that name.
func Candidate(name string) (Scheme, bool) {
	all := Candidates()
	i := slices.IndexFunc(all, func(s Scheme) bool { return s.Name == name })
	if i < 0 {
		return Scheme{}, false
	}
	return all[i], true
}

// Candidates are the schemes that were compared, and why they are what they
// are: fixed sizes as the layers had; cuts by content at any byte, the usual
// way; the same at block borders only; with borders at files; and files cut
// evenly. Content-defined chunks are between a quarter and four times their average.
func Candidates() (out []Scheme) {
	for _, kib := range []int64{64, 128, 256, 512, 1024} {
		out = append(out, Fixed(fmt.Sprintf("fixed %d", kib), kib<<10))
	}
	for _, kib := range []int64{64, 128, 256, 512} {
		l := Limits{Min: kib << 8, Avg: kib << 10, Max: kib << 12}
		out = append(out, Gear(fmt.Sprintf("gear %d", kib), l), Blocks(fmt.Sprintf("blocks %d", kib), l))
	}
	for _, kib := range []int64{64, 128, 256} {
		l := Limits{Min: kib << 8, Avg: kib << 10, Max: kib << 12}
		out = append(out, FilesAndBlocks(fmt.Sprintf("files+blocks %d", kib), l, kib<<10),
			FilesFixed(fmt.Sprintf("files+fixed %d", kib), l, kib<<10, kib<<10))
	}
	return out
}
