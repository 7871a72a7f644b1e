package fullvm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
)

// agentJob is what a child of a test does until it is killed.
type agentJob struct {
	Dir  string // of the world
	Name string // of its control groups
	Stop string // where it says "there", and hangs: made, mark; else the failpoint at which it is killed
	Req  runtime.Request
}

// agent is another agent of a world.
func agent(text string) {
	check := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	var j agentJob
	check(json.Unmarshal([]byte(text), &j))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	groups, err := cgroup.Open(j.Name)
	check(err)
	h, err := hold.Dial(ctx, filepath.Join(j.Dir, "hold"))
	check(err)
	mounts, err := rootfs.Open(ctx, rootfs.Options{Keeper: h, Linger: time.Hour})
	check(err)
	disks, err := diskpool.Open(ctx, diskpool.Options{Dir: filepath.Join(j.Dir, "pool"), Size: 8 << 30, Keeper: mounts.Keeper()})
	check(err)
	driver, err := qemu.New(ctx, qemu.Config{Dir: filepath.Join(j.Dir, "vm"), UID: testUID, UIDs: 100, Keep: &qemu.Keep{Hold: h, Place: Place(groups)}})
	check(err)
	r, err := Open(ctx, Config{Dir: filepath.Join(j.Dir, "sandboxes"), Machines: driver, Groups: groups, Disks: disks, Mounts: mounts, Lost: h.Done(), Since: h.Info().Started})
	check(err)
	if j.Stop != "made" && j.Stop != "mark" {
		failpoint.Arm(j.Stop, failpoint.Kill())
	}
	_, err = r.Create(ctx, j.Req)
	check(err)
	if j.Stop == "mark" {
		check(r.Mark(ctx, j.Req.ID, "m"))
		failpoint.Arm("fullvm.mark.taken", func(context.Context, string) error {
			fmt.Println("there")
			select {}
		})
		check(r.Mark(ctx, j.Req.ID, "m"))
	}
	fmt.Println("there")
	select {}
}
