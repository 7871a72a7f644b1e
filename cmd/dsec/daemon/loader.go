package daemon

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"net/url"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/retry"
	"github.com/opendsec/dsec/internal/supervise"
	"github.com/opendsec/dsec/layer/ondemand/loader"
)

// loaderSocketFD is where the agent connects to the loader.
const loaderSocketFD = supervise.FirstFD + 1

// patient tries as long as a reader waits, which its context says: an outage that
// is over before that is seen by nobody, and blamed on no sandbox.
var patient = retry.Policy{Tries: math.MaxInt, Most: 2 * time.Second}

// Loader is the hidden verb of the process that brings the data of layers.
func Loader() *cobra.Command {
	return role{name: "loader", short: "Bring the data of layers as they are read", open: openLoader}.verb()
}

func openLoader(ctx context.Context, o orders, log *slog.Logger) (*serving, error) {
	s := &settings{Config: o.Config}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, dsec.E(dsec.Internal, "give up new privileges", "", err)
	}
	f := os.NewFile(loaderSocketFD, "loader.sock")
	l, err := net.FileListener(f)
	_ = f.Close()
	if err != nil {
		return nil, dsec.E(dsec.Internal, "listen", s.loaderSocket(), err)
	}
	blobs, err := openBlobsWith(ctx, s, patient)
	takeCredentials()
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	server := loader.NewServer(loader.Options{Blobs: blobs, BlobStats: func() any { return blobs.Stats() }, Window: traceWindow, Log: log})
	ended, failed := make(chan struct{}), error(nil)
	out := &serving{ended: ended, why: dsec.Errorf(dsec.Unavailable, "serve layers", s.loaderSocket(), "the loader has ended"),
		close: func(context.Context) error {
			err := l.Close()
			<-ended
			return errors.Join(err, failed, blobs.Close())
		}}
	go func() {
		failed = server.Run(l.(*net.UnixListener))
		close(ended)
	}()
	return out, nil
}

// loaderChild is the loader as a process of its own: no root, and of all
// capabilities only the one to read files, where objects are files or the keys
// to them are in one.
func (s *settings) loaderChild(order, socket *os.File) supervise.Child {
	c := supervise.Child{Name: "loader", Argv: []string{self, "loader"}, Env: s.credentials, Files: []*os.File{order, socket}, UID: s.Node.LoaderUID, GID: s.Node.LoaderUID,
		Ready: readyWithin, Grace: gatewayEnds}
	if s.blobsAreFiles() || s.keysAreInAFile() {
		c.Caps = []uintptr{unix.CAP_DAC_READ_SEARCH}
	}
	return c
}

func (s *settings) blobsAreFiles() bool { return s.parsedBlobs().Scheme == "file" }

// keysAreInAFile says that whoever asks object storage reads its keys from a
// file, which only root may do, again and again.
func (s *settings) keysAreInAFile() bool { return s.parsedBlobs().Query().Get("credentials") != "" }

// parsedBlobs is empty if the setting is none.
func (s *settings) parsedBlobs() *url.URL {
	where, _, err := s.blobURL()
	if err != nil {
		return &url.URL{}
	}
	u, err := url.Parse(where)
	if err != nil {
		return &url.URL{}
	}
	return u
}

// makeBlobDir makes the directory of object storage, if it is one: the loader,
// which starts before the agent, may not.
func (s *settings) makeBlobDir(ctx context.Context) error {
	if !s.blobsAreFiles() {
		return nil
	}
	b, err := openBlobs(ctx, s)
	if err != nil {
		return err
	}
	return b.Close()
}

// loaderListen makes the socket of the loader. It outlives loaders: the agent
// connects to it whether or not one runs.
func (s *settings) loaderListen() (*os.File, error) { return listenOwn("unixpacket", s.loaderSocket()) }

// listenOwn makes a socket that only root may connect to.
func listenOwn(network, path string) (*os.File, error) {
	_ = os.Remove(path)
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		return nil, dsec.E(dsec.Internal, "listen", path, err)
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, dsec.E(dsec.Internal, "listen", path, err)
	}
	f, err := l.File()
	if err != nil {
		return nil, dsec.E(dsec.Internal, "listen", path, err)
	}
	return f, nil
}
