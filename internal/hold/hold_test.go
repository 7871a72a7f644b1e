package hold

import (
	"net"
	"testing"

	"github.com/opendsec/dsec/process"
)

const crashRole = "crash-client"

func crashClient(args []string) {}

func echoFiles(c net.Conn) error {
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil {
		return err
	}
	_, err = c.Write(b[:n])
	return err
}

func TestExecReturnsOutputAndCode(t *testing.T) {
	b := newBed(t)
	x := b.box()
	r, out, errs := x.run(x.sh("echo out; echo err >&2; id -u; cat /proc/1/comm; exit 7"))
	if r.Status != process.Exited || r.ExitCode != 7 || errs != "err\n" {
		t.Fatalf("%+v %q %q", r, out, errs)
	}
	t.Logf("%+v %q", r, out)
}
