package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// What of the platform, or of others, is to be found: agents in training have
// searched for sockets to forge messages to, for logs to read, and for programs to
// replace.
var leaks = map[string]technique{
	"leaked-descriptors": leakedDescriptors,
	"standard-streams":   standardStreams,
	"search-sockets":     searchSockets,
	"search-files":       searchFiles,
	"search-processes":   func() error { return searchProcesses("dsec") },
	"search-neighbours":  func() error { return searchProcesses("neighbours-secret") },
	"search-mounts":      searchMounts,
	"search-environment": searchEnvironment,
	"abstract-sockets":   abstractSockets,
	"sysv-of-others":     sysvOfOthers,
	"other-user-maps":    memoryOfOtherUser,
}

func fdText(f *os.File) string { return fmt.Sprint(f.Fd()) }

// leakedDescriptors are any beside the three.
func leakedDescriptors() error {
	self, err := os.Open("/proc/self/fd")
	if err != nil {
		return err
	}
	defer func() { _ = self.Close() }()
	names, err := self.Readdirnames(-1)
	if err != nil {
		return err
	}
	var more []string
	for _, n := range names {
		to, err := os.Readlink("/proc/self/fd/" + n)
		if err == nil && n != "0" && n != "1" && n != "2" && !strings.HasPrefix(to, "anon_inode:[event") && !ofThis(n, self) {
			more = append(more, n+" → "+to)
		}
	}
	if len(more) > 0 {
		return worked(strings.Join(more, ", "))
	}
	return blockedBy("nothing beside the three streams")
}

func ofThis(n string, f *os.File) bool { return n == fdText(f) }

// standardStreams wants one of the three to be more than a stream.
func standardStreams() error {
	for fd := range 3 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		to, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err != nil {
			return err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFIFO:
		case unix.S_IFCHR:
			if to != "/dev/null" && !strings.HasPrefix(to, "/dev/pts/") && !control {
				return worked("stream " + to)
			}
		default:
			return worked("a stream is " + to)
		}
	}
	return blockedBy("the streams are pipes and the null device")
}

// top is where a search begins.
func top() string {
	if control {
		return "."
	}
	return "/"
}

// found walks everything that is no file of the kernel's.
func found(is func(path string, d fs.DirEntry) bool) string {
	hit := ""
	_ = filepath.WalkDir(top(), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // closed: the next
		}
		if path == "/proc" || path == "/sys" {
			return filepath.SkipDir
		}
		if is(path, d) {
			hit = path
			return filepath.SkipAll
		}
		return nil
	})
	return hit
}

func searchSockets() error {
	if control {
		l, err := net.Listen("unix", "socket")
		if err != nil {
			return err
		}
		defer func() { _ = l.Close() }()
	}
	if hit := found(func(_ string, d fs.DirEntry) bool { return d.Type()&fs.ModeSocket != 0 }); hit != "" {
		return worked("a socket " + hit)
	}
	return blockedBy("there is no socket")
}

func searchFiles() error {
	if hit := found(func(_ string, d fs.DirEntry) bool { return strings.Contains(d.Name(), "dsec") }); hit != "" {
		return worked("a file " + hit)
	}
	return blockedBy("nothing has our name")
}

func searchProcesses(what string) error {
	for _, file := range []string{"cmdline", "comm", "environ", "maps"} {
		all, err := filepath.Glob("/proc/[0-9]*/" + file)
		if err != nil {
			return err
		}
		for _, name := range all {
			b, err := os.ReadFile(name)
			if err == nil && bytes.Contains(b, []byte(what)) && !bytes.Contains(b, []byte("search-")) {
				return worked(name + " has " + what)
			}
		}
	}
	return blockedBy("no process has " + what)
}

// searchMounts looks for paths of the machine in what is mounted.
func searchMounts() error {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		for _, of := range []string{"dsec", "/var/", "/data/", "/sandboxes/", "/run/"} {
			if strings.Contains(line, of) {
				return worked(line)
			}
		}
	}
	return blockedBy("no mount names a path of the machine")
}

func searchEnvironment() error {
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		for _, of := range []string{"DSEC", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "_KEY"} {
			if strings.Contains(name, of) {
				return worked(e)
			}
		}
	}
	return blockedBy("no name of the environment promises a secret")
}

// abstractSockets are reached by a name, not by a path: they are the network
// namespace's.
func abstractSockets() error {
	if control {
		l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err == nil {
			err = unix.Bind(l, &unix.SockaddrUnix{Name: "@dsec-test"})
		}
		if err != nil {
			return err
		}
	}
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	for _, l := range lines[1:] {
		if strings.Contains(l, "@") || strings.Contains(l, "/") {
			return worked(l)
		}
	}
	return blockedBy(fmt.Sprintf("of %d sockets none has a name", len(lines)-1))
}

// sysvOfOthers wants a segment that it has not made.
func sysvOfOthers() error {
	if control {
		if _, err := unix.SysvShmGet(0xd5ec, 4096, unix.IPC_CREAT|0o600); err != nil {
			return err
		}
	}
	b, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		return err
	}
	if n := bytes.Count(b, []byte("\n")) - 1; n > 0 {
		return worked(fmt.Sprint("there are ", n, " segments"))
	}
	return blockedBy("there is no segment")
}
