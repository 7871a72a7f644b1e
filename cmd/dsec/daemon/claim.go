package daemon

import (
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// claims says which data an instance of this machine has. An instance names
// control groups and networks: another dsec of that name, with data of its own,
// would take the sandboxes of the first for strays and end them.
const claims = "/run/dsec-instances"

// claim is what is written down of an instance.
type claim struct {
	Data      string `json:"data"`
	Lock      string `json:"lock"` // held by the supervisor
	Hold      string `json:"hold"` // socket; the lock beside it is held by the hold
	UIDBase   uint32 `json:"uid_base"`
	UIDRanges int    `json:"uid_ranges"`
}

func (s *settings) claim() claim {
	return claim{Data: s.Data, Lock: s.lockFile(), Hold: s.holdSocket(), UIDBase: s.Node.UIDBase, UIDRanges: s.Node.UIDRanges}
}

func (s *settings) claimFile() string { return filepath.Join(claims, s.Instance) }

// alive is true if somebody of that instance runs.
func (c claim) alive() bool { return isLocked(c.Lock) || isLocked(c.Hold+".lock") }

func isLocked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close() // and with it what was locked to see
	return errors.Is(linux.Flock(f, unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

func readClaim(path string) (c claim, ok bool) {
	b, err := os.ReadFile(path)
	return c, err == nil && json.Unmarshal(b, &c) == nil
}

// foreign is an error if the instance is another dsec's, with other data, that
// runs.
func (s *settings) foreign() error {
	if c, ok := readClaim(s.claimFile()); ok && c.Data != s.Data && c.alive() {
		return dsec.Errorf(dsec.Conflict, "take instance", s.Instance,
			"it runs with the data in %s: choose another --instance, or end that one with --data %s", c.Data, c.Data)
	}
	return nil
}

// take writes down that the instance is ours.
func (s *settings) take(log *slog.Logger) error {
	if err := os.MkdirAll(claims, 0o700); err != nil {
		return dsec.E(dsec.Internal, "take instance", s.Instance, err)
	}
	all, err := os.Open(claims)
	if err != nil {
		return dsec.E(dsec.Internal, "take instance", s.Instance, err)
	}
	defer all.Close()
	if err := linux.Flock(all, unix.LOCK_EX); err != nil {
		return dsec.E(dsec.Internal, "take instance", s.Instance, err)
	}
	if err := s.foreign(); err != nil {
		return err
	}
	s.warnOfSharedUIDs(log)
	b, err := json.Marshal(s.claim())
	if err == nil {
		err = os.WriteFile(s.claimFile(), b, 0o600)
	}
	if err != nil {
		return dsec.E(dsec.Internal, "take instance", s.Instance, err)
	}
	return nil
}

// warnOfSharedUIDs: two sandboxes with one host uid are one user to the kernel.
func (s *settings) warnOfSharedUIDs(log *slog.Logger) {
	end := func(c claim) uint64 { return uint64(c.UIDBase) + uint64(c.UIDRanges)<<16 }
	entries, _ := os.ReadDir(claims)
	for _, e := range entries {
		c, ok := readClaim(filepath.Join(claims, e.Name()))
		if !ok || c.Data == s.Data || !c.alive() {
			continue
		}
		if ours := s.claim(); uint64(ours.UIDBase) < end(c) && uint64(c.UIDBase) < end(ours) {
			log.Warn("another dsec of this machine has uids of ours: set node.uid_base", "instance", e.Name(), "uid_base", c.UIDBase)
		}
	}
}

// leave forgets the claim if nothing of the instance is left.
func (s *settings) leave() {
	if c, ok := readClaim(s.claimFile()); ok && c.Data == s.Data && !c.alive() {
		_ = os.Remove(s.claimFile())
	}
	_ = os.Remove(claims) // fails if others are there
}
