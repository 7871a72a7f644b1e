package confine

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func TestAProfileBelowItsMinimumIsRefused(t *testing.T) {
	for _, p := range Profiles {
		for _, tier := range []dsec.Tier{dsec.TierContainer, dsec.TierFunction, dsec.TierMicroVM, dsec.TierFullVM} {
			err := Require(p, tier)
			if ok := IsolationOf(tier) >= Minimum(p); ok != (err == nil) {
				t.Errorf("%s in %s: %v", p, tier, err)
			}
			if err == nil {
				continue
			}
			for _, part := range []string{string(p), string(tier), "fullvm", "mount"} {
				if !errors.Is(err, dsec.Unsupported.Err()) || !strings.Contains(err.Error(), part) {
					t.Errorf("%s in %s: %v does not say %s", p, tier, err, part)
				}
			}
		}
	}
	if Minimum(Nested) != OwnKernel || Minimum(Desktop) != SharedKernel || Minimum(Pwn) != SharedKernel {
		t.Error("minimum of nested, desktop, pwn:", Minimum(Nested), Minimum(Desktop), Minimum(Pwn))
	}
}

func TestEveryAbilitySaysWhatItNeedsAndWhy(t *testing.T) {
	for _, p := range Profiles {
		if _, ok := abilities[p]; !ok {
			t.Errorf("profile %s has no list", p)
		}
		for _, a := range p.Abilities() {
			if i, why := Needs(a); i < SharedKernel || why == "" || !p.Gives(a) {
				t.Errorf("%s of %s needs %v: %q", a, p, i, why)
			}
		}
	}
}

func TestMachinesThatCannotGiveAProfileSayTheSetting(t *testing.T) {
	good := Machine{CorePattern: "core", UserNamespaces: 1000, Unprivileged: true}
	for _, c := range []struct {
		change func(*Machine)
		p      Profile
		want   string // "" is good
	}{
		{func(*Machine) {}, Pwn, ""}, {func(*Machine) {}, Desktop, ""},
		{func(m *Machine) { m.CorePattern = "|/usr/share/apport/apport %p" }, Pwn, "core_pattern"},
		{func(m *Machine) { m.CorePattern = "@/run/coredump.socket" }, Pwn, "core_pattern"},
		{func(m *Machine) { m.CorePattern = "|/bin/x" }, Build, ""},
		{func(m *Machine) { m.UserNamespaces = 0 }, Desktop, "max_user_namespaces"},
		{func(m *Machine) { m.Unprivileged = false }, Desktop, "unprivileged_userns"},
		{func(m *Machine) { m.Unprivileged = false }, Debug, ""},
	} {
		m := good
		c.change(&m)
		err := m.On(c.p)
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, dsec.Unsupported.Err()) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s on %+v: %v, want %q", c.p, m, err, c.want)
		}
	}
}

// Numbers are written out here so that a slip in the tables shows.
func TestWhatTheProfilesAdd(t *testing.T) {
	const clone, unshare, socket, setsockopt, ioctl, mount, setns, keyctl, ptrace = 56, 272, 41, 54, 16, 165, 308, 250, 101
	only := func(p ...Profile) []Profile { return p }
	everywhere := Profiles
	for _, c := range []struct {
		call string
		nr   uint32
		args [6]uint64
		who  []Profile
	}{
		{"ptrace", ptrace, [6]uint64{}, only(Debug, Pwn, Nested)},
		{"raw socket", socket, [6]uint64{2, 3, 255}, only(Debug, Pwn, Nested)},
		{"packet socket", socket, [6]uint64{17, 3, 0x300}, only(Pwn, Nested)},
		{"packet ring", setsockopt, [6]uint64{0, 263, 5}, only(Build, Debug, Desktop, Nested)}, // without a packet socket it does nothing
		{"Chromium's clone", clone, [6]uint64{0x70000011}, only(Desktop, Nested)},
		{"unshare of a user namespace", unshare, [6]uint64{0x10000000}, only(Desktop, Nested)},
		{"clone with a mount namespace", clone, [6]uint64{0x10020011}, only(Nested)},
		{"unshare of a time namespace", unshare, [6]uint64{0x10000080}, only(Nested)},
		{"route netlink", socket, [6]uint64{16, 3, 0}, only(Build, Debug, Pwn, Nested)},
		{"netfilter netlink", socket, [6]uint64{16, 3, 12}, only(Nested)},
		{"IPT_SO_SET_REPLACE", setsockopt, [6]uint64{0, 0, 64}, only(Build, Debug, Pwn, Nested)},
		{"IP_XFRM_POLICY", setsockopt, [6]uint64{0, 0, 17}, only(Build, Debug, Pwn, Nested)},
		{"IPV6_TCLASS", setsockopt, [6]uint64{0, 41, 67}, everywhere},
		{"SIOCSIFFLAGS", ioctl, [6]uint64{0, 0x8914}, only(Build, Debug, Pwn, Nested)},
		{"SIOCGIFFLAGS", ioctl, [6]uint64{0, 0x8913}, everywhere},
		{"personality ADDR_NO_RANDOMIZE", 135, [6]uint64{0x40000}, everywhere},
		{"mount", mount, [6]uint64{}, only(Nested)}, {"setns", setns, [6]uint64{}, only(Nested)}, {"keyctl", keyctl, [6]uint64{}, only(Nested)},
		{"io_uring_setup", 425, [6]uint64{}, nil}, {"init_module", 175, [6]uint64{}, nil}, {"kexec_load", 246, [6]uint64{}, nil},
	} {
		for _, p := range Profiles {
			r := Explain(p, AMD64, c.nr, c.args)
			if (r.Errno == "") != slices.Contains(c.who, p) {
				t.Errorf("%s under %s: %s", c.call, p, r.Text())
			}
		}
	}
}
