// Package accounts resolves the users that a sandbox knows by its own
// /etc/passwd and /etc/group, and makes the environment of a command of theirs.
// The files are the sandbox's and prove nothing. It also hands out the ranges of
// uids that sandboxes have outside.
package accounts

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

// Caps on what is read from inside a sandbox.
const (
	maxAccountFile = 1 << 20
	maxGroups      = 64

	// IDs is how many ids there are inside, from 0.
	IDs = 1 << 16
)

// Identity is who a command runs as.
type Identity struct {
	UID, GID uint32
	Groups   []uint32 // supplementary
	Name     string   // in /etc/passwd, or the number
	Home     string
}

// Files are the two files as the sandbox has them; missing ones are empty.
type Files struct {
	Passwd, Group []byte
}

// ReadCapped reads at most what an account file may hold, of a regular file only.
func ReadCapped(f *os.File) ([]byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, nil
	}
	return io.ReadAll(io.LimitReader(f, maxAccountFile))
}

// Lookup resolves "name", "uid", "name:group", "uid:gid"; "" is root. A number
// needs no entry; a name does.
func (a *Files) Lookup(user string) (Identity, error) {
	const op = "look up user"
	if user == "" {
		user = "0"
	}
	u, g, withGroup := strings.Cut(user, ":")
	who := Identity{Home: "/", Name: u}
	n, numeric, err := parseID(u)
	if err != nil {
		return who, dsec.E(dsec.Invalid, op, dsec.Quote(user), err)
	}
	who.UID = n
	found := false
	eachEntry(a.Passwd, 6, func(f []string) bool {
		uid, ok, err := parseID(f[2])
		if err != nil || !ok || (numeric && uid != n) || (!numeric && f[0] != u) {
			return true
		}
		gid, ok, err := parseID(f[3])
		if err != nil || !ok {
			return true
		}
		who.UID, who.GID, who.Name, found = uid, gid, f[0], true
		if strings.HasPrefix(f[5], "/") {
			who.Home = f[5]
		}
		return false
	})
	switch {
	case !found && !numeric:
		return who, dsec.Errorf(dsec.NotFound, op, dsec.Quote(u), "no such user in the sandbox's /etc/passwd")
	case !found && who.UID == 0:
		who.Name, who.Home = "root", "/root"
	}
	if !withGroup {
		who.Groups = a.memberships(who.Name, who.GID)
		return who, nil
	}
	who.GID, err = a.lookupGroup(g)
	return who, err
}

func (a *Files) lookupGroup(g string) (uint32, error) {
	const op = "look up group"
	n, numeric, err := parseID(g)
	if err != nil {
		return 0, dsec.E(dsec.Invalid, op, dsec.Quote(g), err)
	}
	if numeric {
		return n, nil
	}
	found := false
	eachEntry(a.Group, 3, func(f []string) bool {
		gid, ok, err := parseID(f[2])
		if err == nil && ok && f[0] == g {
			n, found = gid, true
		}
		return !found
	})
	if !found {
		return 0, dsec.Errorf(dsec.NotFound, op, dsec.Quote(g), "no such group in the sandbox's /etc/group")
	}
	return n, nil
}

// memberships are the groups that list the user, and its own.
func (a *Files) memberships(name string, gid uint32) []uint32 {
	groups := []uint32{gid}
	eachEntry(a.Group, 4, func(f []string) bool {
		n, ok, err := parseID(f[2])
		if err == nil && ok && !slices.Contains(groups, n) && slices.Contains(strings.Split(f[3], ","), name) {
			groups = append(groups, n)
		}
		return len(groups) < maxGroups
	})
	return groups
}

// parseID reads a number that the sandbox's ids can hold; text that is no
// number is a name.
func parseID(s string) (n uint32, numeric bool, err error) {
	if s == "" {
		return 0, false, errEmptyName
	}
	if strings.Trim(s, "0123456789") != "" {
		return 0, false, nil
	}
	v, err := strconv.ParseUint(s, 10, 32)
	if err != nil || v >= IDs {
		return 0, false, errLargeID
	}
	return uint32(v), true, nil
}

// eachEntry calls fn with the fields of every line that has at least n, until
// fn returns false.
func eachEntry(file []byte, n int, fn func(fields []string) bool) {
	lines := bufio.NewScanner(bytes.NewReader(file))
	lines.Buffer(make([]byte, 0, 4096), maxAccountFile)
	for lines.Scan() {
		f := strings.Split(lines.Text(), ":")
		if len(f) >= n && !fn(f) {
			return
		}
	}
}
