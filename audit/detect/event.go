package detect

import (
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

const mostTold = 8 // records that an event names

// Event is how a finding is told to those who follow a sandbox. Its time is that of
// the last sign.
func Event(f dsec.HackFinding) dsec.Event {
	seqs := make([]string, 0, mostTold)
	for _, n := range f.Evidence[:min(len(f.Evidence), mostTold)] {
		seqs = append(seqs, strconv.FormatUint(n, 10))
	}
	return dsec.Event{Type: dsec.EventFinding, Time: f.Last, Detail: f.Title, Fields: map[string]string{
		"class": string(f.Class), "confidence": strconv.FormatFloat(f.Confidence, 'f', 2, 64),
		"count": strconv.FormatInt(f.Count, 10), "evidence": strings.Join(seqs, ",")}}
}
