package linux

import "golang.org/x/sys/unix"

// Received lists the descriptors that control messages of a unix socket brought;
// they are the caller's.
func Received(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil { // else it is another message
			fds = append(fds, got...)
		}
	}
	return fds, nil
}
