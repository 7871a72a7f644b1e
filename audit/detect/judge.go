package detect

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// Judge implements audit.Judge with a Detector for each question.
type Judge struct{}

var _ audit.Judge = Judge{}

// Judge implements audit.Judge.
func (Judge) Judge(ctx context.Context, task dsec.HackTask, k audit.Known) ([]dsec.HackFinding, error) {
	d, err := New(Config{HackTask: task, Pids: k.Pids})
	if err != nil {
		return nil, err
	}
	if err := d.Replay(ctx, k.Records, k.Events); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), "judge evidence", "", err)
	}
	if k.End != nil && len(k.Records) > 0 {
		d.AddResult(*k.End, k.Records[len(k.Records)-1].Time)
	}
	return d.Findings(), nil
}

// Event implements audit.Judge.
func (Judge) Event(f dsec.HackFinding) dsec.Event { return Event(f) }
