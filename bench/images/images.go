// Package images knows what the measurements work on: root file systems,
// wheels and workspaces that build.sh makes of Debian and PyPI packages, and
// the commands that are run in them.
package images

import (
	"bufio"
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

//go:embed images.txt
var imageTable []byte

//go:embed runs.txt
var runTable []byte

// Image is a line of images.txt whose tar is there.
type Image struct {
	Name string
	Kind string // root, wheels or workspace
	Path string // of the tar
}

// Run is a command in a sandbox.
type Run struct {
	Name    string
	Layers  []string // names of images, bottom first
	Command string   // of a shell
}

// Argv runs the command as if the image had said which directories hold programs.
func (r Run) Argv() []string {
	return []string{"/bin/sh", "-c", "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; " + r.Command}
}

// Found returns the images whose tars are in dir, in the order of the table.
func Found(dir string) ([]Image, error) {
	rows, err := table(imageTable)
	if err != nil {
		return nil, fmt.Errorf("images.txt: %w", err)
	}
	var out []Image
	for _, r := range rows {
		path := filepath.Join(dir, r[0]+".tar")
		if _, err := os.Stat(path); err == nil {
			out = append(out, Image{Name: r[0], Kind: r[1], Path: path})
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("find images: none in %s: run bench/images/build.sh", dir)
	}
	return out, nil
}

// Runs returns the commands for which all of the images are there.
func Runs(have []Image) ([]Run, error) {
	names := map[string]bool{}
	for _, i := range have {
		names[i.Name] = true
	}
	rows, err := table(runTable)
	if err != nil {
		return nil, fmt.Errorf("runs.txt: %w", err)
	}
	var out []Run
next:
	for _, r := range rows {
		run := Run{Name: r[0], Layers: strings.Fields(r[1]), Command: r[2]}
		for _, l := range run.Layers {
			if !names[l] {
				continue next
			}
		}
		out = append(out, run)
	}
	return out, nil
}

// table reads lines of three columns; the last may contain the separator.
func table(text []byte) (rows [][3]string, err error) {
	s := bufio.NewScanner(bytes.NewReader(text))
	for s.Scan() {
		line := strings.TrimSpace(s.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		cols := strings.SplitN(line, " | ", 3)
		if len(cols) != 3 {
			return nil, fmt.Errorf("%q is not three columns", line)
		}
		rows = append(rows, [3]string{strings.TrimSpace(cols[0]), strings.TrimSpace(cols[1]), strings.TrimSpace(cols[2])})
	}
	return rows, s.Err()
}
