package daemon

import (
	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit/detect"
)

// judge looks for reward hacks with the defaults of the detectors; who knows the task
// better asks `dsec findings`.
func judge(records []dsec.AuditRecord, events []dsec.Event, end *dsec.Result) []dsec.Event {
	d, err := detect.New(detect.Config{})
	if err != nil {
		return nil // the defaults are good
	}
	d.Replay(records, events)
	if end != nil && len(records) > 0 {
		d.AddResult(*end, records[len(records)-1].Time)
	}
	var found []dsec.Event
	for _, f := range d.Findings() {
		if f.Confidence >= detect.DefaultThreshold {
			found = append(found, detect.Event(f))
		}
	}
	return found
}
