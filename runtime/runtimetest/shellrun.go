package runtimetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

// shell runs commands for one process of the fake.
type shell struct {
	p      *proc
	env    map[string]string
	cwd    string
	status int
	exited bool
}

// stdio of a command.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

func newShell(p *proc) *shell { return &shell{p: p, env: maps.Clone(p.env), cwd: p.cwd} }

func (s *shell) fork() *shell {
	c := *s
	c.env = maps.Clone(s.env)
	return &c
}

// command runs argv as the main process and returns its exit code.
func (s *shell) command(ctx context.Context, argv []string) int {
	io := stdio{in: &input{p: s.p}, out: output{s.p, s.p.out}}
	io.err = io.out
	if s.p.err != nil {
		io.err = output{s.p, s.p.err}
	}
	return s.exec(ctx, argv, io)
}

// script runs a text.
func (s *shell) script(ctx context.Context, text string, io stdio) int {
	list, err := parseScript(text)
	if err != nil {
		fmt.Fprintln(io.err, "sh: syntax error:", err)
		return 2
	}
	return s.list(ctx, list, io)
}

func (s *shell) list(ctx context.Context, list []item, io stdio) int {
	for i := 0; i < len(list) && !s.exited && ctx.Err() == nil; i++ {
		it := list[i]
		if it.then == "&" {
			s.spawn(it, io)
			continue
		}
		s.status = s.pipeline(ctx, it.stages, io)
		for i+1 < len(list) && (list[i].then == "&&" && s.status != 0 || list[i].then == "||" && s.status == 0) {
			i++
		}
	}
	return s.status
}

// spawn runs in the background: until the end of the tree, not of the main
// process. Its stdin is empty.
func (s *shell) spawn(it item, stdio stdio) {
	c := s.fork()
	stdio.in = strings.NewReader("")
	run := func() { c.pipeline(s.p.tree, it.stages, stdio) }
	s.p.background.Add(1)
	s.p.jobs.Go(func() {
		defer s.p.background.Done()
		run()
	})
	s.status = 0
}

func (s *shell) pipeline(ctx context.Context, stages []stage, sio stdio) int {
	if len(stages) == 1 {
		return s.stage(ctx, stages[0], sio)
	}
	in := sio.in
	var ends []chan struct{}
	var last int
	for i, st := range stages {
		here := stdio{in: in, out: sio.out, err: sio.err}
		var w *io.PipeWriter
		var r *io.PipeReader
		if i < len(stages)-1 {
			r, w = io.Pipe()
			here.out = w
		}
		upstream, _ := in.(*io.PipeReader)
		end := make(chan struct{})
		ends = append(ends, end)
		c := s.fork()
		s.p.jobs.Go(func() {
			defer close(end)
			code := c.stage(ctx, st, here)
			if w != nil {
				_ = w.Close() // a pipe's never errs
			} else {
				last = code
			}
			if upstream != nil {
				_ = upstream.Close() // the writer gets an error, as by SIGPIPE
			}
		})
		in = r
	}
	for _, e := range ends {
		<-e
	}
	return last
}

func (s *shell) stage(ctx context.Context, st stage, sio stdio) int {
	sio, closeFiles, err := s.redirect(st.redirs, sio)
	if err != nil {
		fmt.Fprintln(sio.err, "sh:", err)
		return 1
	}
	defer closeFiles()
	switch {
	case st.cond != nil:
		for ctx.Err() == nil && !s.exited && s.p.b.clock.gate(ctx) == nil && s.list(ctx, st.cond, sio) == 0 {
			s.list(ctx, st.body, sio)
			if s.p.b.clock.sleep(ctx, spin) != nil {
				break
			}
		}
		return 0
	case st.sub:
		return s.fork().list(ctx, st.group, sio)
	case st.group != nil:
		return s.list(ctx, st.group, sio)
	}
	return s.simple(ctx, st.words, sio)
}

// simple runs assignments or a command.
func (s *shell) simple(ctx context.Context, words []word, sio stdio) int {
	var argv []string
	set := map[string]string{}
	for _, w := range words {
		if k, v, ok := s.assignment(w); ok && len(argv) == 0 {
			set[k] = v
			continue
		}
		argv = append(argv, s.expand(w)...)
	}
	if len(argv) == 0 {
		maps.Copy(s.env, set)
		return 0
	}
	run := s
	if len(set) > 0 {
		run = s.fork()
		maps.Copy(run.env, set)
	}
	return run.exec(ctx, argv, sio)
}

func (s *shell) assignment(w word) (k, v string, ok bool) {
	for i, p := range w {
		if p.quoted || p.expand {
			return "", "", false
		}
		if p.text == "=" {
			return k, strings.Join(s.expandQuoted(w[i+1:]), ""), k != ""
		}
		k += p.text
	}
	return "", "", false
}

func (s *shell) value(name string) string {
	switch name {
	case "$":
		return fmt.Sprint(s.p.pid)
	case "?":
		return fmt.Sprint(s.status)
	}
	return s.env[name]
}

func (s *shell) expandQuoted(w word) []string {
	var b strings.Builder
	for _, p := range w {
		if p.expand {
			b.WriteString(s.value(p.text))
		} else {
			b.WriteString(p.text)
		}
	}
	return []string{b.String()}
}

// expand splits what unquoted variables hold at blanks.
func (s *shell) expand(w word) []string {
	var out []string
	cur, has := "", false
	for _, p := range w {
		text := p.text
		if p.expand {
			text = s.value(p.text)
		}
		if !p.expand || p.quoted {
			cur, has = cur+text, true
			continue
		}
		for i, f := range strings.Fields(text) {
			if i > 0 {
				out = append(out, cur)
				cur = ""
			}
			cur, has = cur+f, true
		}
	}
	if has {
		out = append(out, cur)
	}
	return out
}

// redirect opens what the redirections name.
func (s *shell) redirect(rs []redirect, sio stdio) (_ stdio, closeAll func(), err error) {
	closeAll = func() {}
	for _, r := range rs {
		name := s.expandQuoted(r.target)[0]
		switch {
		case r.op == ">&" && name == "2":
			sio.out = sio.err
		case r.op == ">&" && name == "1":
			sio.err = sio.out
		case r.op == ">&":
			return sio, closeAll, fmt.Errorf("%s: bad descriptor", name)
		case r.op == "<":
			text, err := s.readFile(name)
			if err != nil {
				return sio, closeAll, err
			}
			sio.in = bytes.NewReader(text)
		default:
			w, err := s.openFile(name, r.op == ">>")
			if err != nil {
				return sio, closeAll, err
			}
			if r.fd == 2 {
				sio.err = w
			} else {
				sio.out = w
			}
		}
	}
	return sio, closeAll, nil
}

// fileWriter appends to a file of the sandbox.
type fileWriter struct {
	s    *shell
	path string
}

func (w fileWriter) Write(b []byte) (int, error) {
	fs := w.s.p.b.fs
	fs.mu.Lock()
	defer fs.mu.Unlock()
	_, err := fs.put(w.s.p.user, w.path, bytes.Clone(b), true, nil)
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

func (s *shell) abs(p string) string {
	if path.IsAbs(p) {
		return p
	}
	return path.Join(s.cwd, p)
}

func (s *shell) openFile(name string, appendTo bool) (io.Writer, error) {
	fs := s.p.b.fs
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if _, err := fs.put(s.p.user, s.abs(name), nil, appendTo, nil); err != nil {
		return nil, shellError(name, err)
	}
	return fileWriter{s, s.abs(name)}, nil
}

func (s *shell) readFile(name string) ([]byte, error) {
	fs := s.p.b.fs
	fs.mu.Lock()
	defer fs.mu.Unlock()
	n, err := fs.walk(s.p.user, s.abs(name), true, maxLinks)
	switch {
	case err != nil:
		return nil, shellError(name, err)
	case n.isDir():
		return nil, fmt.Errorf("%s: Is a directory", name)
	case n.kind == files.File && !s.p.user.may(n, 4):
		return nil, fmt.Errorf("%s: Permission denied", name)
	}
	return n.data, nil
}

func shellError(name string, err error) error {
	text := map[dsec.Class]string{dsec.FileNotFound: "No such file or directory", dsec.NotADirectory: "Not a directory",
		dsec.IsADirectory: "Is a directory", dsec.PermissionDenied: "Permission denied", dsec.NoSpace: "No space left on device"}[dsec.ClassOf(err)]
	if text == "" {
		return err
	}
	return errors.New(name + ": " + text)
}
