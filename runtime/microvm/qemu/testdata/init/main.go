// init is PID 1 of the guests of the tests: it loads modules, says "ready" on the
// port "agent", and answers one line with one line.
package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const blkFlushBuffers = 0x1261

var (
	word string // what "set" set
	kept []byte // what "fill" filled
)

func main() {
	if _, err := os.Stat("/agent"); err == nil { // the real one is to be tried
		_ = os.MkdirAll("/lib/dsec", 0o755)
		_ = os.Symlink("/modules.order", "/lib/dsec/modules")
		fmt.Println("agent", syscall.Exec("/agent", []string{"/agent"}, nil))
	}
	defer syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	os.Stdout.WriteString("console: the guest begins\n")
	for _, m := range [][2]string{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := syscall.Mount(m[0], m[1], m[0], 0, ""); err != nil {
			fmt.Println("mount", m[1], err)
		}
	}
	list, _ := os.ReadFile("/modules.order")
	for _, name := range strings.Fields(string(list)) {
		if err := load("/" + name); err != nil {
			fmt.Println("load", name, err)
		}
	}
	port, err := open()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Fprintln(port, "ready")
	for in := bufio.NewScanner(port); in.Scan(); {
		answer, err := do(strings.Fields(in.Text()))
		if err != nil {
			answer = "error: " + err.Error()
		}
		fmt.Fprintln(port, answer)
	}
}

func load(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	const finitModule = 313
	empty := []byte{0}
	if _, _, e := syscall.Syscall(finitModule, f.Fd(), uintptr(unsafe.Pointer(&empty[0])), 0); e != 0 {
		return e
	}
	return nil
}

func open() (*os.File, error) {
	for range 500 {
		ports, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, p := range ports {
			if name, _ := os.ReadFile(p); strings.TrimSpace(string(name)) == "agent" {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(p)), os.O_RDWR, 0)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, fmt.Errorf("there is no port")
}

func do(a []string) (string, error) {
	if len(a) == 0 {
		return "", fmt.Errorf("nothing")
	}
	arg := append(a[1:], "", "", "")
	switch a[0] {
	case "ping":
		return "pong", nil
	case "set":
		word = arg[0]
		return "ok", nil
	case "get":
		return word, nil
	case "fill": // MiB with a byte in each page
		mib, err := strconv.Atoi(arg[0])
		if err != nil {
			return "", err
		}
		kept = make([]byte, mib<<20)
		for i := 0; i < len(kept); i += 512 {
			copy(kept[i:], arg[1])
		}
		return "ok", nil
	case "cat":
		b, err := os.ReadFile(arg[0])
		return strings.TrimSpace(string(b)), err
	case "read", "write":
		return block(a[0], arg)
	case "mount": // an EROFS, read past the page cache
		return "ok", syscall.Mount(arg[0], "/mnt", "erofs", syscall.MS_RDONLY, "dax=always")
	case "sum": // of a file, and by how many KiB the page cache grew
		before := cached()
		b, err := os.ReadFile(arg[0])
		grew := cached() - before
		return fmt.Sprintf("%x %v", sha256.Sum256(b), grew < 1024), err
	case "off":
		syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	case "panic":
		return "", os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	case "shout": // on the console, n lines
		n, _ := strconv.Atoi(arg[0])
		for range n {
			os.Stdout.WriteString(strings.Repeat("x", 100) + "\n")
		}
		return "ok", nil
	case "say": // n KiB in one answer
		n, err := strconv.Atoi(arg[0])
		return strings.Repeat("s", n<<10), err
	case "up": // an interface, and one packet through it
		return up()
	}
	return "", fmt.Errorf("unknown: %s", a[0])
}

// cached is what the page cache has, in KiB.
func cached() int {
	text, _ := os.ReadFile("/proc/meminfo")
	for _, l := range strings.Split(string(text), "\n") {
		if f := strings.Fields(l); len(f) > 1 && f[0] == "Cached:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

func block(how string, arg []string) (string, error) {
	at, err := strconv.ParseInt(arg[1], 10, 64)
	if err != nil {
		return "", err
	}
	f, err := os.OpenFile(arg[0], os.O_RDWR, 0)
	if err != nil {
		f, err = os.Open(arg[0])
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	if how == "write" {
		if _, err := f.WriteAt([]byte(arg[2]), at); err != nil {
			return "", err
		}
		return "ok", f.Sync()
	}
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), blkFlushBuffers, 0); e != 0 {
		return "", e
	}
	b := make([]byte, 8)
	_, err = f.ReadAt(b, at)
	return hex.EncodeToString(b), err
}

func up() (string, error) {
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, 0)
	if err != nil {
		fd, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0)
		if err != nil {
			return "", err
		}
	}
	defer syscall.Close(fd)
	var req [40]byte
	copy(req[:], "eth0")
	req[16] = 1 | 0x40 // IFF_UP|IFF_RUNNING
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&req[0]))); e != 0 {
		return "", e
	}
	return "ok", nil
}
