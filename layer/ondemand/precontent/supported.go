package precontent

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// answerWithin is how long the kernel may take to tell of a read that is being
// made; it bounds a probe, not a reader.
const answerWithin = 10 * time.Second

// Supported tries it in a directory: a file that is marked, a read that is
// refused, and one that waits until its bytes have come. nil: data files can
// lie there. Else the error says what is missing: Unsupported (file system,
// kernel) or PermissionDenied.
func Supported(dir string) error {
	const op = "try pre-content events"
	group, err := NewGroup()
	if err != nil {
		return err
	}
	defer group.Close()
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return dsec.E(dsec.Unsupported, op, dir, fmt.Errorf("make a file: %w", err))
	}
	data := os.NewFile(uintptr(fd), dir)
	defer data.Close()
	if err := data.Truncate(probeSize); err != nil {
		return dsec.E(dsec.Unsupported, op, dir, err)
	}
	if err := Mark(group, data); err != nil {
		return err
	}
	if err := probe(group, data); err != nil {
		return dsec.E(dsec.Unsupported, op, dir, err)
	}
	return nil
}

const (
	probeSize = 64 << 10
	probeByte = 0x5a
)

func probe(group, data *os.File) error {
	// Opened again, because a mark is for what is opened after it.
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", data.Fd()), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	reader := os.NewFile(uintptr(fd), data.Name())
	defer reader.Close()
	for _, fill := range []bool{false, true} {
		if err := probeRead(group, data, reader, fill); err != nil {
			return err
		}
	}
	return nil
}

// probeRead has one read made and answers what the kernel asks.
func probeRead(group, data, reader *os.File, fill bool) error {
	var b [1]byte
	read := make(chan error, 1)
	go func() { // returns at the latest when the group is closed
		_, err := unix.Pread(int(reader.Fd()), b[:], probeSize/2)
		read <- err
	}()
	e, err := probeEvent(group)
	if err != nil {
		group.Close()
		return errors.Join(err, <-read)
	}
	response := deny
	if fill {
		response = allow
		_, err = data.WriteAt([]byte{probeByte}, probeSize/2)
	}
	_, sent := group.Write(answer(e.fd, response))
	if err = errors.Join(err, sent, unix.Close(int(e.fd))); err != nil {
		group.Close()
		return errors.Join(err, <-read)
	}
	switch err := <-read; {
	case fill && (err != nil || b[0] != probeByte):
		return fmt.Errorf("a read that waited for its bytes got %#x: %v", b[0], err)
	case !fill && err != unix.EIO:
		return fmt.Errorf("a read that was refused: %v", err)
	}
	return nil
}

func probeEvent(group *os.File) (event, error) {
	if err := group.SetReadDeadline(time.Now().Add(answerWithin)); err != nil {
		return event{}, err
	}
	b := make([]byte, shape.Size)
	if _, err := group.Read(b[:eventRoom]); err != nil {
		return event{}, fmt.Errorf("the kernel does not tell of a read: %w", err)
	}
	e, err := parse(b)
	if err == nil && (e.off > probeSize/2 || e.off+e.n <= probeSize/2) {
		err = fmt.Errorf("the kernel tells of [%d, %d)", e.off, e.off+e.n)
	}
	if err != nil {
		return e, errors.Join(err, unix.Close(int(e.fd)))
	}
	return e, nil
}
