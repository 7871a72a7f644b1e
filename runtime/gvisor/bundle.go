package gvisor

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"

	"github.com/opendsec/dsec"

	"github.com/opendsec/dsec/runtime/gvisor/inside"
)

// What of an OCI bundle is said to runsc.
type (
	ociSpec struct {
		Version     string            `json:"ociVersion"`
		Process     ociProcess        `json:"process"`
		Root        ociRoot           `json:"root"`
		Hostname    string            `json:"hostname"`
		Mounts      []ociMount        `json:"mounts"`
		Linux       ociLinux          `json:"linux"`
		Annotations map[string]string `json:"annotations"`
	}
	ociProcess struct {
		User         struct{ UID, GID uint32 } `json:"user"`
		Args         []string                  `json:"args"`
		Env          []string                  `json:"env"`
		Cwd          string                    `json:"cwd"`
		Capabilities ociCaps                   `json:"capabilities"`
	}
	ociCaps struct {
		Bounding  []string `json:"bounding"`
		Effective []string `json:"effective"`
		Permitted []string `json:"permitted"`
	}
	ociRoot struct {
		Path string `json:"path"`
	}
	ociMount struct {
		Destination string   `json:"destination"`
		Type        string   `json:"type"`
		Source      string   `json:"source"`
		Options     []string `json:"options,omitempty"`
	}
	ociLinux struct {
		Namespaces []ociNamespace `json:"namespaces"`
	}
	ociNamespace struct {
		Type string `json:"type"`
		Path string `json:"path,omitempty"`
	}
)

// upperFile is the archive of the upper layer on the disk of a sandbox.
const upperFile = "upper.tar"

// sandboxName is what runsc calls the one sandbox it knows of in a shell.
const sandboxName = "sandbox"

// bundleOf says what runsc is to run. linked: the shell has a network; saved: the disk has
// an archive of the upper layer.
func bundleOf(setup inside.Setup, hostname string, limit int64, linked, saved bool) (ociSpec, error) {
	argv, err := inside.InitArgv(setup)
	if err != nil {
		return ociSpec{}, err
	}
	bounding, permitted := inside.Who{Bounding: initCaps, Permitted: initCaps}.Capabilities()
	s := ociSpec{Version: "1.0.0", Root: ociRoot{placeEmpty}, Hostname: hostname,
		Process: ociProcess{Args: argv, Env: []string{"GOMAXPROCS=1", "GOTRACEBACK=none"}, Cwd: "/",
			Capabilities: ociCaps{bounding, permitted, permitted}},
		Mounts: []ociMount{{"/proc", "proc", "proc", nil}, {"/dev", "tmpfs", "tmpfs", nil}, {"/sys", "sysfs", "sysfs", []string{"ro"}},
			// The gofer serves this empty directory and nothing else: without a mount that
			// needs one, runsc of this version has no disk below an upper layer.
			{"/dev/hugepages", "bind", placeEmpty, []string{"ro"}}},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source":  placeImage + "/" + imageFile,
			"dev.gvisor.spec.rootfs.type":    "erofs",
			"dev.gvisor.spec.rootfs.overlay": "dir=" + placeDisk,
		}}
	if limit > 0 {
		s.Annotations["dev.gvisor.spec.rootfs.options"] = "size=" + strconv.FormatInt(limit, 10)
	}
	if saved {
		s.Annotations["dev.gvisor.tar.rootfs.upper"] = placeDisk + "/" + upperFile
	}
	for _, n := range []string{"pid", "ipc", "uts", "mount"} {
		s.Linux.Namespaces = append(s.Linux.Namespaces, ociNamespace{Type: n})
	}
	network := ociNamespace{Type: "network"} // of its own, with nothing in it
	if linked {
		network.Path = "/proc/self/ns/net" // the shell's, where the link is
	}
	s.Linux.Namespaces = append(s.Linux.Namespaces, network)
	return s, nil
}

// initCaps are those of PID 1: what root needs for files.
const initCaps = fileCaps

// writeBundle writes it where the shell finds it.
func writeBundle(dir string, s ociSpec) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, "config.json")
	if err := os.WriteFile(path, b, 0o644); err != nil {
		return dsec.E(dsec.Internal, "write bundle", path, err)
	}
	return nil
}

// runscOf is how runsc is called in the shell of a sandbox.
func runscOf(linked bool) inside.Runsc {
	network := "none"
	if linked {
		network = "sandbox"
	}
	return inside.Runsc{Path: binDir + "/" + runscFile, Name: sandboxName, Flags: []string{"--root=" + inside.StateDir, "--ignore-cgroups", "--platform=systrap",
		"--network=" + network, "--overlay2=root:dir=" + placeDisk, "--host-uds=none", "--allow-rootfs-tar-annotation"}}
}
