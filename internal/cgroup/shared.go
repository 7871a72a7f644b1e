package cgroup

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The v1 hierarchies cpuset and devices hold no group per sandbox but one per
// distinct rule: a sandbox costs one mkdir and its kernel memory less for each.
// Their names have a '-', which no sandbox's name has. They stay until
// RemoveAll.

// cpusGroup is the name of the group of a set of CPUs; "." is the Root's own.
func cpusGroup(set []int) string {
	if set == nil {
		return "."
	}
	return "cpus-" + strings.ReplaceAll(formatCPUs(set), ",", "_")
}

func (r *Root) shareCPUs(set []int) error {
	return r.share("cpuset", cpusGroup(set), func(d dir, name string) error {
		mems, err := d.read("cpuset.mems")
		if err != nil {
			return err
		}
		if err := d.write(name+"/cpuset.mems", mems); err != nil {
			return err
		}
		return d.write(name+"/cpuset.cpus", formatCPUs(set))
	})
}

// devicesGroup is the name of the group of an allow-list; "." is the Root's own.
func devicesGroup(list []Device) string {
	switch {
	case list == nil:
		return "."
	case slices.Equal(list, defaultDevices):
		return defaultGroup
	}
	return nameDevices(list)
}

// Nearly every sandbox has these, and is asked for their name several times.
var (
	defaultDevices = DefaultDevices()
	defaultGroup   = nameDevices(defaultDevices)
)

func nameDevices(list []Device) string {
	return "dev-" + strings.NewReplacer(" ", "_", ":", ".", "*", "a", "\n", "+").Replace(strings.Join(deviceLines(list), "\n"))
}

func (r *Root) shareDevices(list []Device) error {
	return r.share("devices", devicesGroup(list), func(d dir, name string) error {
		if err := d.write(name+"/devices.deny", "a"); err != nil {
			return err
		}
		for _, line := range deviceLines(list) {
			if err := d.write(name+"/devices.allow", line); err != nil {
				return err
			}
		}
		return nil
	})
}

// share makes a shared group once. One that another process left half-made is
// set up again: the rules are the same.
func (r *Root) share(controller, name string, setUp func(dir, string) error) error {
	if name == "." {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shared[controller+"/"+name] {
		return nil
	}
	d := r.v1[controller]
	if err := d.mkdir(name); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	if err := setUp(d, name); err != nil {
		return err
	}
	r.shared[controller+"/"+name] = true
	return nil
}

// deviceLines writes a list as v1 wants it, sorted.
func deviceLines(list []Device) []string {
	lines := make([]string, 0, len(list))
	for _, d := range list {
		kind, minor := "c", "*"
		if d.Block {
			kind = "b"
		}
		if d.Minor >= 0 {
			minor = strconv.FormatInt(d.Minor, 10)
		}
		lines = append(lines, kind+" "+strconv.FormatInt(d.Major, 10)+":"+minor+" "+d.Access)
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// DefaultDevices is null, zero, full, random, urandom, tty, ptmx and pts. All
// may be opened, none may be made: the host made those that are in /dev.
func DefaultDevices() []Device {
	d := []Device{}
	for _, minor := range []int64{3, 5, 7, 8, 9} {
		d = append(d, Device{Major: 1, Minor: minor, Access: "rw"})
	}
	return append(d,
		Device{Major: 5, Minor: 0, Access: "rw"},
		Device{Major: 5, Minor: 2, Access: "rw"},
		Device{Major: 136, Minor: -1, Access: "rw"})
}
