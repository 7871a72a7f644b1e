package linux

import (
	"os"
	"strconv"
	"strings"
)

const fileMaxPath = "/proc/sys/fs/file-max"

// RaiseFileMax takes the limit of open files of the whole machine away, as
// systemd does at boot, and returns what it was. Memory of open files is charged
// to who opens them, so groups bound it; the limit is shared by all, and one
// group could use it up.
func RaiseFileMax() (was uint64, err error) {
	b, err := os.ReadFile(fileMaxPath)
	if err != nil {
		return 0, err
	}
	if was, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err != nil {
		return 0, err
	}
	const most = 1<<63 - 1
	if was == most {
		return was, nil
	}
	return was, os.WriteFile(fileMaxPath, []byte(strconv.FormatUint(most, 10)), 0)
}
