package runtimetest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec/files"
)

// spin is how long one turn of an empty loop takes.
const spin = 100 * time.Microsecond

// exec runs a builtin of the shell or a program.
func (s *shell) exec(ctx context.Context, argv []string, sio stdio) int {
	if s.p.b.clock.gate(ctx) != nil {
		return 128 + int(syscall.SIGKILL)
	}
	name, args := argv[0], argv[1:]
	if code, ok := s.builtin(name, args, sio); ok {
		return code
	}
	at, err := s.p.b.fs.lookPath(name, s.env["PATH"], s.cwd, s.p.user)
	if err != nil {
		fmt.Fprintf(sio.err, "sh: %s: not found\n", name)
		return 127
	}
	base := path.Base(at)
	switch {
	case base == "sh":
		return s.sh(ctx, args, sio)
	case base == "setsid" && len(args) > 0:
		return s.exec(ctx, args, sio)
	}
	fn := programs[base]
	if fn == nil {
		fmt.Fprintf(sio.err, "sh: %s: the fake cannot run this\n", name)
		return 126
	}
	return fn(s, ctx, args, sio)
}

// sh runs "sh -c SCRIPT", or a script from stdin.
func (s *shell) sh(ctx context.Context, args []string, sio stdio) int {
	c := s.fork()
	if len(args) >= 2 && args[0] == "-c" {
		return c.script(ctx, args[1], sio)
	}
	text, err := io.ReadAll(sio.in)
	if err != nil {
		return fail(sio, "sh", err)
	}
	return c.script(ctx, string(text), sio)
}

// builtin runs what changes the shell itself.
func (s *shell) builtin(name string, args []string, sio stdio) (code int, ok bool) {
	first := ""
	if len(args) > 0 {
		first = args[0]
	}
	switch name {
	case "exit":
		s.exited = true
		s.status, _ = strconv.Atoi(first)
		return s.status & 255, true
	case "cd":
		if first == "" {
			first = s.env["HOME"]
		}
		n, err := s.p.b.fs.lookup(s.p.user, s.abs(first), true)
		if err != nil || !n.isDir() {
			fmt.Fprintf(sio.err, "cd: %s: no such directory\n", first)
			return 1, true
		}
		s.cwd = s.abs(first)
		return 0, true
	case "export":
		for _, a := range args {
			if k, v, set := strings.Cut(a, "="); set {
				s.env[k] = v
			}
		}
		return 0, true
	case "trap":
		if len(args) > 1 && first == "" {
			for _, a := range args[1:] {
				s.p.ignore(signalNumber(a))
			}
			return 0, true
		}
		fmt.Fprintln(sio.err, "trap: the fake knows the empty action only")
		return 1, true
	}
	return 0, false
}

func (p *proc) ignore(sig int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ignored[sig] = true
}

type program func(s *shell, ctx context.Context, args []string, sio stdio) int

// programs are what the files in the fake's /bin do.
var programs = map[string]program{
	":":      func(*shell, context.Context, []string, stdio) int { return 0 },
	"true":   func(*shell, context.Context, []string, stdio) int { return 0 },
	"false":  func(*shell, context.Context, []string, stdio) int { return 1 },
	"echo":   runEcho,
	"cat":    runCat,
	"chmod":  runChmod,
	"env":    runEnv,
	"head":   runHead,
	"id":     runID,
	"kill":   runKill,
	"ls":     runLs,
	"mkdir":  runMkdir,
	"nc":     runNc,
	"nproc":  func(s *shell, _ context.Context, _ []string, sio stdio) int { return print(sio, s.p.b.cpus(), "\n") },
	"printf": runPrintf,
	"pwd":    func(s *shell, _ context.Context, _ []string, sio stdio) int { return print(sio, s.cwd, "\n") },
	"rm":     runRm,
	"seq":    runSeq,
	"sleep":  runSleep,
	"tail":   runTail,
	"test":   runTest,
	"touch":  runTouch,
	"wc":     runWc,
	"yes":    runYes,
}

func (b *box) cpus() int { return max(1, int(math.Ceil(b.req.Spec.Limits.CPU))) }

// print fails as a program does that SIGPIPE ends.
func print(sio stdio, a ...any) int {
	if _, err := io.WriteString(sio.out, fmt.Sprint(a...)); err != nil {
		return 1
	}
	return 0
}

func fail(sio stdio, name string, err error) int {
	fmt.Fprintf(sio.err, "%s: %v\n", name, err)
	return 1
}

func runEcho(_ *shell, _ context.Context, args []string, sio stdio) int {
	end := "\n"
	if len(args) > 0 && args[0] == "-n" {
		args, end = args[1:], ""
	}
	return print(sio, strings.Join(args, " ")+end)
}

func runCat(s *shell, _ context.Context, args []string, sio stdio) int {
	if len(args) == 0 {
		args = []string{"-"}
	}
	for _, a := range args {
		in := sio.in
		if a != "-" {
			text, err := s.readFile(a)
			if err != nil {
				return fail(sio, "cat", err)
			}
			in = bytes.NewReader(text)
		}
		if _, err := io.Copy(sio.out, in); err != nil {
			return fail(sio, "cat", shellError("write", err))
		}
	}
	return 0
}

func runChmod(s *shell, _ context.Context, args []string, sio stdio) int {
	if len(args) != 2 {
		return fail(sio, "chmod", fmt.Errorf("want a mode and a path"))
	}
	mode, err := strconv.ParseUint(args[0], 8, 12)
	if err != nil {
		return fail(sio, "chmod", err)
	}
	fs := s.p.b.fs
	fs.mu.Lock()
	defer fs.mu.Unlock()
	n, err := fs.walk(s.p.user, s.abs(args[1]), true, maxLinks)
	if err != nil {
		return fail(sio, "chmod", shellError(args[1], err))
	}
	n.mode = uint32(mode)
	fs.raiseOne(n)
	return 0
}

func runEnv(s *shell, _ context.Context, _ []string, sio stdio) int {
	var lines []string
	for k, v := range s.env {
		lines = append(lines, k+"="+v+"\n")
	}
	slices.Sort(lines)
	return print(sio, strings.Join(lines, ""))
}

// runHead knows -c N of /dev/zero or stdin.
func runHead(_ *shell, ctx context.Context, args []string, sio stdio) int {
	if len(args) < 2 || args[0] != "-c" {
		return fail(sio, "head", fmt.Errorf("want -c N [/dev/zero]"))
	}
	n, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return fail(sio, "head", err)
	}
	in := sio.in
	if len(args) == 3 && args[2] == "/dev/zero" {
		in = zeros{}
	}
	if _, err := io.CopyN(sio.out, in, n); err != nil && err != io.EOF {
		return fail(sio, "head", shellError("write", err))
	}
	return 0
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func runID(s *shell, _ context.Context, args []string, sio stdio) int {
	u := s.p.user
	switch {
	case len(args) == 1 && args[0] == "-u":
		return print(sio, u.uid, "\n")
	case len(args) == 1 && args[0] == "-g":
		return print(sio, u.gid, "\n")
	}
	return print(sio, fmt.Sprintf("uid=%d gid=%d\n", u.uid, u.gid))
}

var signals = map[string]syscall.Signal{"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "KILL": syscall.SIGKILL,
	"USR1": syscall.SIGUSR1, "SEGV": syscall.SIGSEGV, "USR2": syscall.SIGUSR2, "TERM": syscall.SIGTERM}

func signalNumber(name string) int {
	if n, err := strconv.Atoi(name); err == nil {
		return n
	}
	return int(signals[strings.TrimPrefix(name, "SIG")])
}

func runKill(s *shell, ctx context.Context, args []string, sio stdio) int {
	sig := int(syscall.SIGTERM)
	if len(args) > 1 && strings.HasPrefix(args[0], "-") {
		sig, args = signalNumber(args[0][1:]), args[1:]
	}
	if len(args) != 1 {
		return fail(sio, "kill", fmt.Errorf("want one pid"))
	}
	target := s.p.b.byPid(args[0])
	if target == nil {
		return fail(sio, "kill", fmt.Errorf("no process %s", args[0]))
	}
	target.signal(syscall.Signal(sig))
	return 0
}

func (b *box) byPid(pid string) *proc {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.procs {
		if fmt.Sprint(p.pid) == pid && !p.ended() {
			return p
		}
	}
	return nil
}

func runLs(s *shell, _ context.Context, args []string, sio stdio) int {
	dir := s.cwd
	if len(args) > 0 {
		dir = s.abs(args[len(args)-1])
	}
	fs := s.p.b.fs
	fs.mu.Lock()
	n, err := fs.walk(s.p.user, dir, true, maxLinks)
	var names []string
	if err == nil {
		names = sortedNames(n)
	}
	fs.mu.Unlock()
	if err != nil {
		return fail(sio, "ls", shellError(dir, err))
	}
	if n.kind != files.Dir {
		names = []string{dir}
	}
	for _, name := range names {
		print(sio, name, "\n")
	}
	return 0
}

func runMkdir(s *shell, _ context.Context, args []string, sio stdio) int {
	parents := false
	for _, a := range args {
		if a == "-p" {
			parents = true
			continue
		}
		s.p.b.fs.mu.Lock()
		err := s.p.b.fs.mkdir(s.p.user, s.abs(a), 0o755, parents)
		s.p.b.fs.mu.Unlock()
		if err != nil {
			return fail(sio, "mkdir", shellError(a, err))
		}
	}
	return 0
}

// runNc knows "nc -l -p PORT -e cat": an echo for one connection.
func runNc(s *shell, ctx context.Context, args []string, sio stdio) int {
	if len(args) != 5 || args[0] != "-l" || args[1] != "-p" || args[3] != "-e" || args[4] != "cat" {
		return fail(sio, "nc", fmt.Errorf("want -l -p PORT -e cat"))
	}
	port, err := strconv.ParseUint(args[2], 10, 16)
	if err != nil {
		return fail(sio, "nc", err)
	}
	c, err := s.p.b.listen(uint16(port))
	if err != nil {
		return fail(sio, "nc", err)
	}
	defer s.p.b.unlisten(uint16(port), c)
	select {
	case conn := <-c:
		stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // ends the copy
		defer stop()
		_, _ = io.Copy(conn, conn) // until either side closes
		_ = conn.Close()
		return 0
	case <-ctx.Done():
		return 1
	}
}

func runRm(s *shell, _ context.Context, args []string, sio stdio) int {
	recursive, force := false, false
	for _, a := range args {
		if strings.HasPrefix(a, "-") {
			recursive = recursive || strings.Contains(a, "r")
			force = force || strings.Contains(a, "f")
			continue
		}
		s.p.b.fs.mu.Lock()
		err := s.p.b.fs.remove(s.p.user, s.abs(a), recursive)
		s.p.b.fs.mu.Unlock()
		if err != nil && !force {
			return fail(sio, "rm", shellError(a, err))
		}
	}
	return 0
}

func runSeq(_ *shell, _ context.Context, args []string, sio stdio) int {
	from, to := 1, 0
	if len(args) == 2 {
		from, _ = strconv.Atoi(args[0])
	}
	if len(args) > 0 {
		to, _ = strconv.Atoi(args[len(args)-1])
	}
	for i := from; i <= to; i++ {
		if print(sio, i, "\n") != 0 {
			return 1
		}
	}
	return 0
}

func runSleep(s *shell, ctx context.Context, args []string, sio stdio) int {
	if len(args) != 1 {
		return fail(sio, "sleep", fmt.Errorf("want seconds"))
	}
	sec, err := strconv.ParseFloat(args[0], 64)
	if err != nil {
		return fail(sio, "sleep", err)
	}
	if s.p.b.clock.sleep(ctx, time.Duration(sec*float64(time.Second))) != nil {
		return 1
	}
	return 0
}

// runTail of /dev/zero looks for the last line without end, and so fills the
// memory.
func runTail(s *shell, ctx context.Context, args []string, sio stdio) int {
	if len(args) != 1 || args[0] != "/dev/zero" {
		return fail(sio, "tail", fmt.Errorf("want /dev/zero"))
	}
	s.p.b.outOfMemory(s.p)
	<-ctx.Done()
	return 1
}

func runTest(s *shell, _ context.Context, args []string, _ stdio) int {
	ok := false
	switch {
	case len(args) == 2 && strings.HasPrefix(args[0], "-") && len(args[0]) == 2:
		n, err := s.p.b.fs.lookup(s.p.user, s.abs(args[1]), true)
		switch args[0] {
		case "-e":
			ok = err == nil
		case "-f":
			ok = err == nil && n.kind == files.File
		case "-d":
			ok = err == nil && n.isDir()
		case "-n":
			ok = args[1] != ""
		case "-z":
			ok = args[1] == ""
		}
	case len(args) == 3 && args[1] == "=":
		ok = args[0] == args[2]
	case len(args) == 3 && args[1] == "!=":
		ok = args[0] != args[2]
	}
	if ok {
		return 0
	}
	return 1
}

func runTouch(s *shell, _ context.Context, args []string, sio stdio) int {
	for _, a := range args {
		if _, err := s.openFile(a, true); err != nil {
			return fail(sio, "touch", err)
		}
	}
	return 0
}

// runWc knows -c and -l of stdin.
func runWc(_ *shell, _ context.Context, args []string, sio stdio) int {
	b, err := io.ReadAll(sio.in)
	if err != nil {
		return fail(sio, "wc", err)
	}
	if len(args) == 1 && args[0] == "-l" {
		return print(sio, bytes.Count(b, []byte("\n")), "\n")
	}
	return print(sio, len(b), "\n")
}

func runYes(_ *shell, ctx context.Context, args []string, sio stdio) int {
	word := "y"
	if len(args) > 0 {
		word = args[0]
	}
	block := []byte(strings.Repeat(word+"\n", 4096/(len(word)+1)))
	for ctx.Err() == nil {
		if _, err := sio.out.Write(block); err != nil {
			return 1
		}
	}
	return 1
}

func runPrintf(_ *shell, _ context.Context, args []string, sio stdio) int {
	if len(args) == 0 {
		return 1
	}
	var out []byte
	format, rest := args[0], args[1:]
	for i := 0; ; i++ {
		used := len(rest)
		out, rest = appendFormat(out, format, rest)
		if len(rest) == 0 || len(rest) == used {
			break
		}
	}
	if _, err := sio.out.Write(out); err != nil {
		return 1
	}
	return 0
}

// appendFormat knows %s, %d, %%, and the escapes \n \t \\ and \ooo.
func appendFormat(out []byte, format string, args []string) ([]byte, []string) {
	for i := 0; i < len(format); i++ {
		c := format[i]
		if i+1 == len(format) || c != '%' && c != '\\' {
			out = append(out, c)
			continue
		}
		i++
		switch d := format[i]; {
		case c == '%' && d == '%':
			out = append(out, '%')
		case c == '%':
			if len(args) > 0 {
				out, args = append(out, args[0]...), args[1:]
			}
		case d == 'n':
			out = append(out, '\n')
		case d == 't':
			out = append(out, '\t')
		case d >= '0' && d <= '7':
			v := 0
			j := i
			for ; j < len(format) && j < i+3 && format[j] >= '0' && format[j] <= '7'; j++ {
				v = v*8 + int(format[j]-'0')
			}
			out = append(out, byte(v))
			i = j - 1
		default:
			out = append(out, d)
		}
	}
	return out, args
}
