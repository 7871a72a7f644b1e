// Package ondemandtest is the conformance suite of the mechanisms that stand
// between the kernel and the data of a layer that are not here yet, with real
// mounts, real servers in processes of their own, and real stores.
//
// A mechanism passes if every byte that a reader gets is right, whatever
// happens to the server; if what cannot be had is EIO within a bound, with the
// reason at the layer; and if all is well again by itself when the store is.
//
// The test binary serves and reads in processes that it starts from itself, so
// its TestMain calls Main:
//
//	func TestMain(m *testing.M) { os.Exit(ondemandtest.Main(m)) }
//
// Tests of what layers show run over layers that come in every way there is with
// EachWay.
package ondemandtest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
)

// Mechanism is what is tested.
type Mechanism struct {
	Name string
	// Supported says why data files cannot lie in a directory.
	Supported func(dir string) error
	// Attach puts it before an incomplete data file. It is called before the
	// file is opened by who reads it.
	Attach func(data *os.File) (Attached, error)
	// Serve serves in another process, with the files of Attached.
	Serve func(ctx context.Context, files []*os.File, data *os.File, l *ondemand.Layer) error
	// Stays says that what is mounted is good without a server when the layer is
	// whole, after Whole.
	Stays bool
	// Uncached says that what there is no room for on the disk can be read.
	Uncached bool
	// Loops says that a layer is mounted through loop devices.
	Loops bool
}

// Attached is what outlives the servers of one data file.
type Attached struct {
	Device string     // path by which a file system is given the data
	Files  []*os.File // for each server
	Whole  func() error
	Detach func() // after the mount is gone
}

const serverEnv, readerEnv = "DSEC_ONDEMAND_SERVER", "DSEC_ONDEMAND_READER"

// Main runs the tests, or is one of the processes that they start.
func Main(m *testing.M) int {
	var err error
	switch {
	case os.Getenv(serverEnv) != "":
		err = serve([]byte(os.Getenv(serverEnv)))
	case os.Getenv(readerEnv) != "":
		err = read([]byte(os.Getenv(readerEnv)))
	case os.Getenv(rootEnv) != "":
		err = inRoot(os.Getenv(rootEnv))
	default:
		return m.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// order is what a server is told in its environment.
type order struct {
	Mechanism string
	Store     string // URL
	Dir       string // of the layer
	Deadline  time.Duration
	Trouble   trouble
	Files     int
}

// Descriptors of a server.
const (
	controlFD = 3 + iota
	dataFD
	firstFD
)

func serve(raw []byte) error {
	var o order
	if err := json.Unmarshal(raw, &o); err != nil {
		return err
	}
	store, err := bucket.Open(context.Background(), o.Store)
	if err != nil {
		return err
	}
	broken := fault.New(store)
	broken.Set(o.Trouble.faults())
	data := os.NewFile(dataFD, "data")
	parts, err := open(o.Dir, data)
	if err != nil {
		return err
	}
	room := ondemand.NewRoom(nil)
	l, err := ondemand.Open(parts, ondemand.Options{Blobs: broken, Deadline: o.Deadline, Room: room})
	if err != nil {
		return err
	}
	go control(l, broken, room)
	var files []*os.File
	for i := range o.Files {
		files = append(files, os.NewFile(uintptr(firstFD+i), "file"))
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	for _, m := range Mechanisms() {
		if m.Name != o.Mechanism {
			continue
		}
		if !m.Uncached {
			l.KeepAll()
		}
		if err := m.Serve(ctx, files, data, l); err != nil && ctx.Err() == nil {
			return err
		}
		return l.Close()
	}
	return fmt.Errorf("no mechanism %s", o.Mechanism)
}

// open opens an incomplete layer in its directory of a store.
func open(dir string, data *os.File) (p ondemand.Parts, err error) {
	index, err := os.ReadFile(filepath.Join(dir, layer.IndexFile))
	if err != nil {
		return p, err
	}
	raw, err := os.ReadFile(filepath.Join(dir, layer.ManifestFile))
	if err != nil {
		return p, err
	}
	m, err := layer.DecodeManifest(raw, layer.DigestOf(raw))
	if err != nil {
		return p, err
	}
	ix, err := layer.DecodeIndex(index, m.Data)
	if err != nil {
		return p, err
	}
	f, err := os.OpenFile(filepath.Join(dir, layer.PresentFile), os.O_RDWR, 0)
	if err != nil {
		return p, err
	}
	present, err := layer.OpenPresence(f, len(ix.Chunks))
	return ondemand.Parts{Digest: m.Digest(), Index: ix, Data: data, Present: present}, err
}

// command and said are what is spoken on the control socket.
type command struct {
	Trouble *trouble
	Fill    bool
}

// trouble is what of fault.Faults goes over a socket.
type trouble struct {
	Mode      fault.Mode
	Latency   time.Duration
	Bandwidth int64
}

func (t trouble) faults() fault.Faults {
	return fault.Faults{Mode: t.Mode, Latency: t.Latency, Bandwidth: t.Bandwidth}
}

type said struct {
	Stats    ondemand.Stats
	Last     dsec.Class
	LastText string
	Complete bool
	Here     int // chunks
	Uncached ondemand.Uncached
	Size     int64
	Err      string
}

func control(l *ondemand.Layer, broken *fault.Store, room *ondemand.Room) {
	c, err := net.FileConn(os.NewFile(controlFD, "control"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	in, out := json.NewDecoder(bufio.NewReader(c)), json.NewEncoder(c)
	for {
		var cmd command
		if in.Decode(&cmd) != nil {
			return
		}
		var answer said
		if cmd.Trouble != nil {
			broken.Set(cmd.Trouble.faults())
		}
		if cmd.Fill {
			if err := l.Fill(context.Background()); err != nil {
				answer.Err = err.Error()
			}
		}
		answer.Stats, answer.Complete, answer.Size = l.Stats(), l.Complete(), l.Size()
		answer.Uncached = room.Uncached()
		answer.Here, _ = l.Here()
		if answer.Last = dsec.ClassOf(answer.Stats.Last); answer.Stats.Last != nil {
			answer.LastText = answer.Stats.Last.Error()
		}
		answer.Stats.Last = nil
		if out.Encode(answer) != nil {
			return
		}
	}
}
