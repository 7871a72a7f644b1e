package user

import (
	"context"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// past returns what happened. If nodes could not be asked it errs, and returns
// what the others told.
func past(ctx context.Context, cl *client.Client, e client.Events) ([]dsec.Event, error) {
	events, absent, err := cl.Past(ctx, e)
	if err == nil && len(absent) > 0 {
		var names []string
		for _, n := range absent {
			names = append(names, string(n))
		}
		err = dsec.Errorf(dsec.Unavailable, "read past events of node", strings.Join(names, ", "), "it does not answer")
	}
	return events, err
}

// execsOf returns the commands that events tell of, oldest first.
func execsOf(events []dsec.Event) (ids []string) {
	for _, e := range events {
		if e.Type == dsec.EventExecStarted {
			ids = append(ids, e.Exec)
		}
	}
	return ids
}
