package runtimetest

import (
	"fmt"
	"strings"
)

// The part of the shell language that the fake knows: lists with ";", "&",
// "&&", "||" and newlines, pipelines, groups in ( ) and { }, "while", simple
// commands with assignments, quotes, $NAME, ${NAME}, $$ and $?, and the
// redirections ">", ">>", "<", "2>", ">&2" and "2>&1".

// piece is a part of a word.
type piece struct {
	text   string
	expand bool // text is the name of a variable
	quoted bool
}

type word []piece

// redirect is "fd op target".
type redirect struct {
	fd     int
	op     string // ">", ">>", "<", ">&"
	target word
}

// item is a command and what joins it to the next.
type item struct {
	stages []stage
	then   string // ";", "&", "&&", "||"
}

// stage is one part of a pipeline; one of its fields but redirs is set.
type stage struct {
	words  []word
	group  []item // ( ) or { }
	sub    bool   // ( )
	cond   []item // while
	body   []item
	redirs []redirect
}

// token is an operator if word is nil.
type token struct {
	op   string
	word word
	fd   int // of a redirection
}

// lex cuts a script into tokens.
func lex(s string) ([]token, error) {
	var out []token
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == ' ' || c == '\t':
			i++
		case c == '#' && (i == 0 || strings.IndexByte(" \t\n;", s[i-1]) >= 0):
			for i < len(s) && s[i] != '\n' {
				i++
			}
		case c == '\n':
			out = append(out, token{op: ";"})
			i++
		case (c == '1' || c == '2') && i+1 < len(s) && s[i+1] == '>' && (i == 0 || strings.IndexByte(" \t\n;&|()", s[i-1]) >= 0):
			n := operator(s[i+1:])
			out = append(out, token{op: s[i+1 : i+1+n], fd: int(c - '0')})
			i += 1 + n
		case operator(s[i:]) > 0:
			n := operator(s[i:])
			t := token{op: s[i : i+n], fd: 1}
			if t.op == "<" {
				t.fd = 0
			}
			out = append(out, t)
			i += n
		default:
			w, n, err := lexWord(s[i:])
			if err != nil {
				return nil, err
			}
			out = append(out, token{word: w})
			i += n
		}
	}
	return out, nil
}

func operator(s string) int {
	for _, op := range []string{"&&", "||", ">>", ">&", ";", "&", "|", "(", ")", "<", ">"} {
		if strings.HasPrefix(s, op) {
			return len(op)
		}
	}
	return 0
}

func lexWord(s string) (word, int, error) {
	w := word{}
	i := 0
	for i < len(s) && strings.IndexByte(" \t\n;&|()<>", s[i]) < 0 {
		switch s[i] {
		case '\'':
			end := strings.IndexByte(s[i+1:], '\'')
			if end < 0 {
				return nil, 0, fmt.Errorf("unterminated quote")
			}
			w = append(w, piece{text: s[i+1 : i+1+end], quoted: true})
			i += end + 2
		case '"':
			n, err := lexDouble(s[i+1:], &w)
			if err != nil {
				return nil, 0, err
			}
			i += n + 2
		case '\\':
			if i+1 < len(s) {
				w = append(w, piece{text: s[i+1 : i+2], quoted: true})
			}
			i += 2
		case '$':
			p, n := lexDollar(s[i:], false)
			w = append(w, p)
			i += n
		default:
			w = append(w, piece{text: s[i : i+1]})
			i++
		}
	}
	return w, min(i, len(s)), nil
}

// lexDouble reads up to the closing quote.
func lexDouble(s string, w *word) (int, error) {
	*w = append(*w, piece{quoted: true})
	for i := 0; i < len(s); {
		switch {
		case s[i] == '"':
			return i, nil
		case s[i] == '\\' && i+1 < len(s) && strings.IndexByte("\"\\$`", s[i+1]) >= 0:
			*w = append(*w, piece{text: s[i+1 : i+2], quoted: true})
			i += 2
		case s[i] == '$':
			p, n := lexDollar(s[i:], true)
			*w = append(*w, p)
			i += n
		default:
			*w = append(*w, piece{text: s[i : i+1], quoted: true})
			i++
		}
	}
	return 0, fmt.Errorf("unterminated quote")
}

func lexDollar(s string, quoted bool) (piece, int) {
	if strings.HasPrefix(s, "${") {
		if end := strings.IndexByte(s, '}'); end > 0 {
			return piece{text: s[2:end], expand: true, quoted: quoted}, end + 1
		}
	}
	if len(s) > 1 && (s[1] == '$' || s[1] == '?') {
		return piece{text: s[1:2], expand: true, quoted: quoted}, 2
	}
	n := 1
	for n < len(s) && (s[n] == '_' || s[n] >= 'a' && s[n] <= 'z' || s[n] >= 'A' && s[n] <= 'Z' || n > 1 && s[n] >= '0' && s[n] <= '9') {
		n++
	}
	if n == 1 {
		return piece{text: "$", quoted: quoted}, 1
	}
	return piece{text: s[1:n], expand: true, quoted: quoted}, n
}

// parser turns tokens into a list.
type parser struct {
	toks []token
	at   int
}

func parseScript(s string) ([]item, error) {
	toks, err := lex(s)
	if err != nil {
		return nil, err
	}
	p := &parser{toks: toks}
	list, err := p.list()
	if err == nil && p.at < len(p.toks) {
		err = fmt.Errorf("unexpected %q", p.peek())
	}
	return list, err
}

// peek is the next token as text; a plain word is itself.
func (p *parser) peek() string {
	if p.at >= len(p.toks) {
		return ""
	}
	t := p.toks[p.at]
	if t.word == nil {
		return t.op
	}
	text := ""
	for _, x := range t.word {
		if x.quoted || x.expand {
			return "\x00"
		}
		text += x.text
	}
	return text
}

func (p *parser) list() (out []item, err error) {
	for {
		for p.peek() == ";" {
			p.at++
		}
		switch p.peek() {
		case "", ")", "}", "do", "done":
			return out, nil
		}
		it := item{then: ";"}
		for {
			st, err := p.stage()
			if err != nil {
				return nil, err
			}
			it.stages = append(it.stages, st)
			if p.peek() != "|" {
				break
			}
			p.at++
		}
		switch op := p.peek(); op {
		case ";", "&", "&&", "||":
			it.then = op
			p.at++
		}
		out = append(out, it)
	}
}

func (p *parser) expect(what string) error {
	if p.peek() != what || p.at >= len(p.toks) {
		return fmt.Errorf("want %q, not %q", what, p.peek())
	}
	p.at++
	return nil
}

func (p *parser) stage() (st stage, err error) {
	switch p.peek() {
	case "(", "{":
		st.sub = p.peek() == "("
		p.at++
		if st.group, err = p.list(); err != nil {
			return st, err
		}
		end := "}"
		if st.sub {
			end = ")"
		}
		if err := p.expect(end); err != nil {
			return st, err
		}
	case "while":
		p.at++
		if st.cond, err = p.list(); err != nil {
			return st, err
		}
		if err := p.expect("do"); err != nil {
			return st, err
		}
		if st.body, err = p.list(); err != nil {
			return st, err
		}
		if err := p.expect("done"); err != nil {
			return st, err
		}
	}
	return st, p.simple(&st)
}

// simple reads the words and redirections up to the next operator.
func (p *parser) simple(st *stage) error {
	for p.at < len(p.toks) {
		t := p.toks[p.at]
		switch {
		case t.word != nil:
			if st.group != nil || st.cond != nil {
				return nil
			}
			st.words = append(st.words, t.word)
			p.at++
		case t.op == ">" || t.op == ">>" || t.op == "<" || t.op == ">&":
			p.at++
			if p.at >= len(p.toks) || p.toks[p.at].word == nil {
				return fmt.Errorf("nothing after %q", t.op)
			}
			st.redirs = append(st.redirs, redirect{fd: t.fd, op: t.op, target: p.toks[p.at].word})
			p.at++
		default:
			return nil
		}
	}
	return nil
}
