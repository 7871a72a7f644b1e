// Package daemon wires the processes of a machine: up starts gateway and node
// and keeps them running, down ends everything that runs, doctor says what the
// machine can do. Each constructor returns one verb of the command line; every
// wiring is a list in boot order.
package daemon

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"crypto/rand"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/config"
)

// defaultFile is read if it exists.
const defaultFile = "/etc/dsec/dsec.yaml"

// settings are the flags that the daemon verbs share.
type settings struct {
	file, data, run, instance string
	credentials               []string // of object storage, taken from the environment for the node alone
	config.Config
}

func (s *settings) register(c *cobra.Command) {
	c.Flags().StringVar(&s.file, "config", "", "configuration file (default "+defaultFile+" if it exists)")
	c.Flags().StringVar(&s.data, "data", "", "directory of everything that must survive (default from the configuration)")
	c.Flags().StringVar(&s.instance, "instance", "", "name of this dsec on the machine (default from the configuration)")
	c.Flags().StringVar(&s.run, "run", "", "directory of sockets (default from the configuration)")
}

func defaults() *settings { return &settings{Config: config.Default()} }

// load reads defaults, then the file, then flags, and checks the outcome.
func (s *settings) load() (err error) {
	path, must := s.file, true
	if path == "" {
		path, must = defaultFile, false
	}
	if s.Config, err = config.Load(path, must); err != nil {
		return err
	}
	for flag, field := range map[*string]*string{&s.data: &s.Data, &s.run: &s.Run} {
		if *flag == "" {
			continue
		}
		if *field, err = filepath.Abs(*flag); err != nil {
			return err
		}
	}
	if s.instance != "" {
		s.Instance = s.instance
	}
	if err := s.Validate(); err != nil {
		return err
	}
	_, _, err = s.blobURL()
	return err
}

// The places of a machine's state.
func (s *settings) socket() string         { return filepath.Join(s.Run, "gateway.sock") }
func (s *settings) dataSocket() string     { return filepath.Join(s.Run, "node", "data.sock") }
func (s *settings) holdSocket() string     { return filepath.Join(s.Run, "hold", "hold.sock") }
func (s *settings) loaderSocket() string   { return filepath.Join(s.Run, "hold", "loader.sock") }
func (s *settings) packagesSocket() string { return filepath.Join(s.Run, "hold", "packages.sock") }
func (s *settings) egressSocket() string   { return filepath.Join(s.Run, "hold", "egress.sock") }
func (s *settings) lockFile() string       { return filepath.Join(s.Data, "lock") }
func (s *settings) gatewayDir() string     { return filepath.Join(s.Data, "gateway") }
func (s *settings) nodeDir() string        { return filepath.Join(s.Data, "node") }
func (s *settings) emptyDir() string       { return filepath.Join(s.nodeDir(), "empty") }
func (s *settings) layerDir() string       { return filepath.Join(s.Data, "layers") }
func (s *settings) sandboxDir() string     { return filepath.Join(s.Data, "sandboxes") }
func (s *settings) gvisorDir() string      { return filepath.Join(s.Data, "gvisor", "sandboxes") }
func (s *settings) gvisorImages() string   { return filepath.Join(s.Data, "gvisor", "images") }
func (s *settings) blobDir() string        { return filepath.Join(s.Data, "blobs") }
func (s *settings) poolDir() string        { return filepath.Join(s.Data, "pool") }
func (s *settings) holdLog() string        { return filepath.Join(s.Data, "hold.log") }
func (s *settings) secretFile() string     { return filepath.Join(s.Data, "secret") }
func (s *settings) nodeIDFile() string     { return filepath.Join(s.Data, "node-id") }
func (s *settings) adminMade() string      { return filepath.Join(s.Data, "admin-key-made") }
func (s *settings) cgroupName() string     { return "dsec-" + s.Instance }
func (s *settings) auditDir() string       { return filepath.Join(s.Data, "audit") }
func (s *settings) machineDir() string     { return filepath.Join(s.Data, "machines") }
func (s *settings) templateDir() string    { return filepath.Join(s.Data, "templates") }

// kernelDir is where the kernels of virtual machines are kept.
func (s *settings) kernelDir() string {
	if s.Node.KernelCache != "" {
		return s.Node.KernelCache
	}
	return filepath.Join(s.Data, "kernels")
}

// machineUID is the first user of a virtual machine.
func (s *settings) machineUID() uint32 { return s.Node.UIDBase - config.MachineUIDs }

// nodeID returns the configured id, or the one made at the first start.
func (s *settings) nodeID() (dsec.NodeID, error) {
	if s.Node.ID != "" {
		return dsec.ParseNodeID(s.Node.ID)
	}
	text, err := keep(s.nodeIDFile(), func() string { return dsec.Random(6) })
	if err != nil {
		return "", err
	}
	return dsec.ParseNodeID(text)
}

// secret is what the passwords between gateway and node are derived from.
func (s *settings) secret() (string, error) {
	return keep(s.secretFile(), func() string {
		b := make([]byte, 32)
		_, _ = rand.Read(b) // never fails
		return hex.EncodeToString(b)
	})
}

// keep returns the content of a private file, made if it is missing.
func keep(path string, make func() string) (string, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		tmp := path + ".new"
		if err := os.WriteFile(tmp, []byte(make()), 0o600); err != nil {
			return "", dsec.E(dsec.Internal, "write", tmp, err)
		}
		if err := os.Rename(tmp, path); err != nil {
			return "", dsec.E(dsec.Internal, "write", path, err)
		}
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return "", dsec.E(dsec.Internal, "read", path, err)
	}
	return strings.TrimSpace(string(text)), nil
}

// logger writes JSON lines, or text when a person reads.
func logger(w io.Writer) *slog.Logger { return loggerFrom(w, slog.LevelInfo) }

func loggerFrom(w io.Writer, level slog.Level) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return slog.New(slog.NewTextHandler(w, o))
	}
	return slog.New(slog.NewJSONHandler(w, o))
}

// lock takes the machine's state for one supervisor; the pid of the holder is
// in the file.
func lock(path string) (*os.File, error) {
	f, err := take(path)
	if err != nil {
		return nil, err
	}
	if err := f.Truncate(0); err == nil {
		_, err = fmt.Fprintln(f, os.Getpid())
		if err != nil {
			f.Close()
			return nil, dsec.E(dsec.Internal, "lock", path, err)
		}
	}
	return f, nil
}

// take is lock without a word about the holder: a disk that is full or
// read-only takes none.
func take(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, unix.EROFS) {
		f, err = os.Open(path)
	}
	if err != nil {
		return nil, dsec.E(dsec.Internal, "lock", path, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		pid, _ := io.ReadAll(f)
		f.Close()
		return nil, dsec.Errorf(dsec.AlreadyExists, "lock", path, "dsec up runs already, pid %s", strings.TrimSpace(string(pid)))
	}
	return f, nil
}

func needRoot(op string) error {
	if os.Geteuid() != 0 {
		return dsec.Errorf(dsec.PermissionDenied, op, "", "only root can make sandboxes of this machine")
	}
	return nil
}
