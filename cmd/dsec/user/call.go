package user

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// callFlags describe a call.
type callFlags struct {
	call                        dsec.Call
	image, python, code, module string
	compile, stdin, expect      string
	compare, network, out       string
	layers, files, env          []string
	memory, disk                limitFlag
}

func (f *callFlags) register(c *cobra.Command) {
	p, l := c.Flags(), &f.call.Limits
	p.StringVar(&f.image, "image", "", "root file system of a command or snippet")
	p.StringArrayVar(&f.layers, "layer", nil, "layer above it (repeat)")
	p.StringVar(&f.python, "python", "", "FILE with a snippet, - for stdin")
	p.StringVar(&f.code, "code", "", "a Python snippet")
	p.StringVar(&f.module, "wasm", "", "FILE with a WebAssembly module (WASI preview 1)")
	p.StringVar(&f.compile, "compile", "", "shell line that runs first, in the same place")
	p.StringArrayVar(&f.call.Preload, "preload", nil, "module that the interpreter has imported before (repeat)")
	p.StringArrayVar(&f.files, "file", nil, "FILE[:PATH] that comes with the call (repeat)")
	p.StringArrayVar(&f.call.Outputs, "bring", nil, "pattern of files to bring back, like 'out/**' (repeat)")
	p.StringVar(&f.out, "into", ".", "directory that files come back to")
	p.StringArrayVarP(&f.env, "env", "e", nil, "NAME=VALUE (repeat)")
	p.StringVar(&f.stdin, "stdin", "", "FILE that is its stdin, - for ours")
	p.StringVar(&f.expect, "expect", "", "FILE with what stdout has to be")
	p.StringVar(&f.compare, "compare", "", "how: lines, exact or tokens (default lines)")
	p.StringVar(&f.network, "network", "", "none, or loopback: a network with nothing but itself (default none)")
	p.Float64Var(&l.CPU, "cpu", 0, "cores (default 1)")
	p.DurationVar(&l.Wall, "wall", 0, "most it may take (default 10s)")
	p.DurationVar(&l.CPUTime, "cpu-time", 0, "most CPU time (default as --wall)")
	p.DurationVar(&l.Compile, "compile-time", 0, "most that compiling may take (default 30s)")
	p.Int64Var(&l.Pids, "pids", 0, "processes and threads (default 64)")
	p.Int64Var(&l.Output, "output-bytes", 0, "bytes of each of stdout and stderr (default 1 MiB)")
	p.Int64Var(&l.Fuel, "fuel", 0, "most instructions of a module (default: not counted)")
	f.memory.least = dsec.MinWasmMemory
	p.Var(&f.memory, "memory", "memory, files that it writes included (default 256MiB)")
	p.Var(&f.disk, "disk", "bytes in files (default a quarter of the memory)")
	p.StringVar(&f.call.CallID, "call-id", "", "key that makes the call idempotent")
}

func (f *callFlags) build(c *cobra.Command, args []string) (dsec.Call, error) {
	k := f.call
	k.Type, k.Command, k.Image = dsec.CallExec, args, dsec.LayerRef(f.image)
	k.Compare, k.Network = dsec.CallCompare(f.compare), dsec.CallNetwork(f.network)
	k.Limits.Memory, k.Limits.Disk = int64(f.memory.bytesFlag), int64(f.disk.bytesFlag)
	for _, l := range f.layers {
		k.Layers = append(k.Layers, dsec.LayerRef(l))
	}
	if f.compile != "" {
		k.Compile = []string{"/bin/sh", "-c", f.compile}
	}
	var err error
	if k.Env, err = pairs("env", f.env); err != nil {
		return k, err
	}
	read := func(name string, into *[]byte) {
		if name == "" || err != nil {
			return
		}
		*into, err = readCall(c, name)
	}
	if given := slices.DeleteFunc([]string{f.code, f.python, f.module}, func(s string) bool { return s == "" }); len(given) > 1 {
		return k, usage("make call", "of --code, --python and --wasm one")
	}
	switch {
	case f.code != "":
		k.Type, k.Code = dsec.CallPython, []byte(f.code)
	case f.python != "":
		k.Type = dsec.CallPython
		read(f.python, &k.Code)
	case f.module != "":
		k.Type = dsec.CallWasm
		read(f.module, &k.Code)
	}
	read(f.stdin, &k.Stdin)
	if f.expect != "" {
		k.Expect = []byte{}
		read(f.expect, &k.Expect)
	}
	for _, pair := range f.files {
		from, to, ok := strings.Cut(pair, ":")
		if !ok {
			to = filepath.Base(from)
		}
		file := dsec.CallFile{Path: to}
		read(from, &file.Data)
		if st, serr := os.Stat(from); serr == nil {
			file.Mode = uint32(st.Mode().Perm())
		}
		k.Files = append(k.Files, file)
	}
	if err != nil {
		return k, err
	}
	return k, k.Validate()
}

// readCall reads a file that can come with a call.
func readCall(c *cobra.Command, name string) ([]byte, error) {
	var r io.Reader = c.InOrStdin()
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, hostError("read", name, err)
		}
		defer f.Close()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, dsec.MaxCallBytes+1))
	if err != nil {
		return nil, hostError("read", name, err)
	}
	return b, nil
}

// Call is the verb that makes a stateless call.
func Call() *cobra.Command {
	var f callFlags
	c := &cobra.Command{
		Use:   "call [FLAGS] [-- COMMAND [ARG...]]",
		Short: "Make a stateless call: a command, a Python snippet or a WebAssembly module",
		Long: `Runs a command of an image, a Python snippet or a WebAssembly module where nothing was
before and of which nothing stays: files come with the call and go back with its answer.
It is served by containers that are there already, each of which is proved clean after
each call or thrown away. There is no network.

Its stdout and stderr are printed, and the exit code is its own; with a limit, a compile
error or a wrong answer the verdict is on stderr, and the exit code is at least 1. -o json
prints everything; files come back all the same.`,
		Example: `  dsec call --image debian:12 -- sh -c 'echo $((6 * 7))'
  dsec call --image python:3.12 --code 'print(sum(range(10)))'
  dsec call --image gcc:14 --file main.c --compile 'gcc -O2 -o main main.c' --stdin 1.in --expect 1.out --cpu-time 1s -- ./main
  dsec call --wasm tool.wasm --stdin data.json --fuel 1000000000 -- --pretty`,
		Args: cobra.ArbitraryArgs,
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveDefault // programs of an image, arguments of a module
		},
		RunE: func(c *cobra.Command, args []string) error {
			k, err := f.build(c, args)
			if err != nil {
				return err
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				res, err := cl.Call(ctx, k)
				if err != nil {
					return err
				}
				if err := putBack(f.out, res.Files); err != nil {
					return err
				}
				if err := show(c, res, func(w io.Writer) error { return printCall(c, w, res) }); err != nil {
					return err
				}
				if res.Verdict != dsec.VerdictOK {
					return ExitCode(max(1, res.ExitCode))
				}
				return nil
			})
		},
	}
	f.register(c)
	_ = c.RegisterFlagCompletionFunc("image", completeLayers) // the flag was made above
	return c
}

// putBack writes the files that came back below a directory.
func putBack(dir string, files []dsec.CallFile) error {
	if len(files) == 0 {
		return nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return hostError("open", dir, err)
	}
	defer root.Close()
	for _, f := range files {
		if parent := filepath.Dir(f.Path); parent != "." {
			if err := root.MkdirAll(parent, 0o755); err != nil {
				return hostError("make", parent, err)
			}
		}
		if err := root.WriteFile(f.Path, f.Data, os.FileMode(f.Mode&0o777)); err != nil {
			return hostError("write", f.Path, err)
		}
	}
	return nil
}

func printCall(c *cobra.Command, w io.Writer, r dsec.CallResult) error {
	if _, err := w.Write(r.Stdout); err != nil {
		return err
	}
	stderr := c.ErrOrStderr()
	_, err := stderr.Write(r.Stderr)
	if r.Verdict != dsec.VerdictOK {
		used := fmt.Sprintf("cpu %s, wall %s, memory %s", r.Usage.CPU.Round(time.Millisecond), r.Usage.Wall.Round(time.Millisecond), size(r.Usage.Memory))
		if r.Usage.Fuel > 0 {
			used += fmt.Sprintf(", fuel %d", r.Usage.Fuel)
		}
		_, err = fmt.Fprintf(stderr, "dsec: %s: %s (%s)\n", r.Verdict, safe(r.Detail), used)
	}
	if r.LeftOut {
		_, err = fmt.Fprintln(stderr, "dsec: not all files came back: they are more than limits.files")
	}
	return err
}
