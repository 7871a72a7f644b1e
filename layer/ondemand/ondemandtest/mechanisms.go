package ondemandtest

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/opendsec/dsec/layer/ondemand"
	"github.com/opendsec/dsec/layer/ondemand/fuse"
	"github.com/opendsec/dsec/layer/ondemand/precontent"
)

// Mechanisms are all there are.
func Mechanisms() []Mechanism { return []Mechanism{overFUSE, byEvents, throughLoops} }

var overFUSE = Mechanism{
	Name:      "fuse",
	Uncached:  true,
	Supported: func(string) error { return nil },
	Attach: func(*os.File) (Attached, error) {
		dev, mount, err := fuse.Mount()
		if err != nil {
			return Attached{}, err
		}
		j, err := fuse.NewJournal()
		if err != nil {
			return Attached{}, errors.Join(err, dev.Close(), mount.Close())
		}
		return Attached{Device: fmt.Sprintf("/proc/self/fd/%d", mount.Fd()), Files: []*os.File{dev, j}, Detach: func() {
			mount.Close()
			dev.Close()
			j.Close()
		}}, nil
	},
	Serve: func(ctx context.Context, files []*os.File, _ *os.File, l *ondemand.Layer) error {
		return fuse.Serve(ctx, files[0], files[1], l)
	},
}

// throughLoops is FUSE where the kernel mounts no files (before 6.12): metadata
// and data are behind loop devices.
var throughLoops = func() Mechanism {
	m := overFUSE
	m.Name, m.Loops = "fuse through loop devices", true
	m.Supported = func(string) error {
		_, err := os.Stat("/dev/loop-control")
		return err
	}
	return m
}()

var byEvents = Mechanism{
	Name:      "pre-content",
	Stays:     true,
	Supported: precontent.Supported,
	Attach: func(data *os.File) (Attached, error) {
		group, err := precontent.NewGroup()
		if err != nil {
			return Attached{}, err
		}
		j, err := precontent.NewJournal()
		if err == nil {
			err = precontent.Mark(group, data)
		}
		if err != nil {
			return Attached{}, errors.Join(err, group.Close())
		}
		return Attached{Device: data.Name(), Files: []*os.File{group, j},
			Whole: func() error { return precontent.Unmark(group, data) },
			Detach: func() {
				group.Close()
				j.Close()
			}}, nil
	},
	Serve: func(ctx context.Context, files []*os.File, data *os.File, l *ondemand.Layer) error {
		dev, ino, err := precontent.ID(data)
		if err != nil {
			return err
		}
		return precontent.Serve(ctx, files[0], files[1], func(d, i uint64) precontent.Source {
			if d == dev && i == ino || d == 0 && i == 0 {
				return l
			}
			return nil
		}, func(context.Context, uint64, uint64, error) {})
	},
}
