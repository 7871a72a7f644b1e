package fault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
)

func TestClasses(t *testing.T) {
	_, missing := os.Open("/none/such")
	for _, c := range []struct {
		err  error
		want dsec.Class
	}{
		{&os.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}, dsec.NoSpace},
		{fmt.Errorf("write: %w", syscall.EDQUOT), dsec.NoSpace},
		{missing, dsec.NotFound},
		{syscall.EACCES, dsec.PermissionDenied},
		{syscall.EIO, dsec.Internal},
		{context.Canceled, dsec.Canceled},
		{fmt.Errorf("read: %w", context.DeadlineExceeded), dsec.Timeout},
		{fmt.Errorf("a: %w", dsec.E(dsec.Corrupt, "b", "", syscall.ENOSPC)), dsec.Corrupt},
		{errors.New("anything"), dsec.Invalid},
	} {
		if got := Class(c.err, dsec.Invalid); got != c.want {
			t.Errorf("%v: %s, want %s", c.err, got, c.want)
		}
	}
}
