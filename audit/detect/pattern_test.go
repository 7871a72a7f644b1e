package detect

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// hostile is what is slow to judge: paths that a sandbox made deep, and patterns that nearly fit.
func hostile(records int) (task dsec.HackTask, k audit.Known) {
	for range dsec.MaxHackPatterns {
		task.Tests = append(task.Tests, "**/a/**/"+strings.Repeat("*a", 250)+"b")
	}
	task.Harness, task.Results = task.Tests, task.Tests
	for i := range records {
		k.Records = append(k.Records, dsec.AuditRecord{Seq: uint64(i + 1), Time: began.Add(time.Duration(i)), Kind: dsec.AuditWrite, Exe: "/bin/x",
			Path: strings.Repeat("/a", dsec.MaxAuditText/2), Detail: dsec.WriteChanged})
	}
	return task, k
}

func TestJudgingEndsWhenNobodyWaits(t *testing.T) {
	task, k := hostile(20_000)
	ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	start := time.Now()
	_, err := Judge{}.Judge(ctx, task, k)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v after %v", err, time.Since(start))
	}
}
