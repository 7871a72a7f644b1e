package agent

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
)

// slotPrefixes begin the names of a machine's slots and disks, "slot:N" and "disk:N" from 0 on, and
// say below which driver the kernel has them, and where their block devices. The numbers in
// /dev are those in which the kernel came to them, which need not be the order in
// which the host has them.
var slotPrefixes = []struct{ prefix, driver, below string }{
	{"slot:", "virtio_pmem", "/ndbus*/region*/namespace*/block/*"},
	{"disk:", "virtio_blk", "/block/*"},
}

// slotWait is for a driver that is still at it.
const slotWait = 10 * time.Second

// withSlots replaces the names of slots by those of their devices.
func withSlots(m guest.FileSystem) (guest.FileSystem, error) {
	var err error
	if m.Source, err = slotDevice(m.Source); err != nil {
		return m, err
	}
	m.Options = slices.Clone(m.Options)
	for i, o := range m.Options {
		name, value, ok := strings.Cut(o, "=")
		if !ok {
			continue
		}
		if value, err = slotDevice(value); err != nil {
			return m, err
		}
		m.Options[i] = name + "=" + value
	}
	return m, nil
}

// slotDevice is the path of a slot's device; a name that is of none stays as it is.
func slotDevice(name string) (string, error) {
	for _, s := range slotPrefixes {
		number, ok := strings.CutPrefix(name, s.prefix)
		if !ok {
			continue
		}
		n, err := strconv.Atoi(number)
		if err != nil || n < 0 {
			return "", dsec.Errorf(dsec.Invalid, "find slot", dsec.Quote(name), "slots are numbers from 0 on")
		}
		deadline := time.Now().Add(slotWait)
		for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
			path, err := slotBlock(n, s.driver, s.below)
			if err == nil || time.Now().After(deadline) {
				return path, err
			}
			time.Sleep(wait)
		}
	}
	return name, nil
}

// slotBlock looks where the kernel has the block device of the n-th device of a driver in
// the order of the bus.
func slotBlock(n int, driver, below string) (string, error) {
	links, err := filepath.Glob("/sys/bus/virtio/drivers/" + driver + "/virtio*")
	if err != nil {
		return "", err
	}
	var places []string
	for _, l := range links {
		p, err := filepath.EvalSymlinks(l)
		if err != nil {
			return "", dsec.E(dsec.Internal, "find slot", strconv.Itoa(n), err)
		}
		places = append(places, p) // …/pci0000:00/0000:00:03.0/virtio2
	}
	slices.SortFunc(places, func(a, b string) int { return strings.Compare(filepath.Dir(a), filepath.Dir(b)) })
	if n >= len(places) {
		return "", dsec.Errorf(dsec.NotFound, "find slot", strconv.Itoa(n), "the machine has %d", len(places))
	}
	blocks, err := filepath.Glob(places[n] + below)
	if err != nil || len(blocks) != 1 {
		return "", dsec.Errorf(dsec.Unavailable, "find slot", strconv.Itoa(n), "%d block devices below %s", len(blocks), places[n])
	}
	return fmt.Sprintf("/dev/%s", filepath.Base(blocks[0])), nil
}
