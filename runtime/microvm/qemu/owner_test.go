package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	guestlink "github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// ownerJob is what a child of a test does with a machine until it is killed.
type ownerJob struct {
	Socket   string
	Dir      string // of the driver
	Do       string
	Name     string
	Shape    vmm.Shape
	Devices  vmm.Devices
	Template vmm.Template
	Snapshot string
	Stop     string // a failpoint at which it says "there", and hangs
}

// owner runs the job and says on stdout where it is.
func owner(text string) {
	var j ownerJob
	check := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	check(json.Unmarshal([]byte(text), &j))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	c, err := hold.Dial(ctx, j.Socket)
	check(err)
	d, err := New(ctx, Config{Dir: j.Dir, UID: testUID, Keep: &Keep{Hold: c}})
	check(err)
	failpoint.Arm(j.Stop, func(context.Context, string) error {
		fmt.Println("there")
		select {}
	})
	j.Devices.Name = j.Name
	fmt.Println("go")
	var m vmm.VM
	switch {
	case j.Do == "take" || j.Do == "resume":
		m, err = d.Adopt(ctx, j.Name)
	case j.Do == "prepare":
		_, err = d.Prepare(ctx, j.Template, j.Devices)
	case j.Template.Key == "":
		m, err = d.Start(ctx, j.Shape, j.Devices)
	default:
		m, err = d.Clone(ctx, j.Template, j.Devices)
	}
	check(err)
	set := func() {
		_, err := fmt.Fprintln(m.Channel(), "set "+j.Name)
		check(err)
		_, err = readWord(m.Channel())
		check(err)
	}
	switch j.Do {
	case "run":
		set()
	case "take":
		check(m.(*machine).settle(ctx, ready, time.Minute))
		_, err := fmt.Fprintln(m.Channel(), bootID)
		check(err)
		id, err := readWord(m.Channel())
		check(err)
		_, err = fmt.Fprintln(m.Channel(), "set "+id)
		check(err)
		_, err = readWord(m.Channel())
		check(err)
	case "session", "resume": // with the real guest, and requests under way
		c, err := guestlink.Connect(ctx, m.Channel(), guestlink.Options{})
		check(err)
		for range 8 {
			go func() {
				for {
					_, err := c.List(ctx)
					check(err)
				}
			}()
		}
	case "half": // a command that the next one's is not a part of
		set()
		_, err := fmt.Fprint(m.(*machine).mon.conn, `{"execute": "sto`)
		check(err)
	case "end":
		check(m.Stop(ctx))
	case "pause":
		set()
		check(m.Pause(ctx))
	case "talk": // the next finds the rest of a word
		set()
		_, err := fmt.Fprintln(m.Channel(), "ping")
		check(err)
		_, err = m.Channel().Read(make([]byte, 2))
		check(err)
	case "commands":
		set()
		fmt.Println("there")
		for {
			check(m.Pause(ctx))
			_, err := m.(*machine).status(ctx)
			check(err)
			check(m.Resume(ctx))
		}
	case "snapshot":
		set()
		fmt.Println("there")
		for i := 0; ; i++ {
			check(m.Snapshot(ctx, filepath.Join(j.Snapshot, fmt.Sprint(i))))
			check(os.RemoveAll(filepath.Join(j.Snapshot, fmt.Sprint(i))))
		}
	}
	fmt.Println("there")
	select {}
}
