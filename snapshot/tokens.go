package snapshot

import (
	"bytes"
	"math"
	"regexp"
	"strings"
)

// What tokens of well-known services look like. An expression is run around its
// anchors only: over every byte of a disk it would take longer than packing it.
var tokens = []struct {
	kind    string
	anchors []string
	reach   int            // bytes behind the last anchor; 0: reach
	form    *regexp.Regexp // nil: addressAt
}{
	{"a private key", []string{"-----BEGIN "}, 0, regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----`)},
	{"an AWS key", []string{"AKIA", "ASIA"}, 0, regexp.MustCompile(`\bA[KS]IA[0-9A-Z]{16}\b`)},
	{"a GitHub token", []string{"ghp_", "gho_", "ghu_", "ghs_", "ghr_"}, 0, regexp.MustCompile(`\bgh[pousr]_[0-9A-Za-z]{36,}`)},
	{"a GitHub token", []string{"github_pat_"}, 0, regexp.MustCompile(`\bgithub_pat_[0-9A-Za-z_]{40,}`)},
	{"a GitLab token", []string{"glpat-"}, 0, regexp.MustCompile(`\bglpat-[0-9A-Za-z_-]{20,}`)},
	{"a Slack token", []string{"xox"}, 0, regexp.MustCompile(`\bxox[abeoprs]-[0-9A-Za-z-]{10,}`)},
	{"a Google key", []string{"AIza"}, 0, regexp.MustCompile(`\bAIza[0-9A-Za-z_-]{35}`)},
	{"a Stripe key", []string{"k_live_"}, 0, regexp.MustCompile(`\b[rs]k_live_[0-9A-Za-z]{16,}`)},
	{"an API key", []string{"sk-"}, 0, regexp.MustCompile(`\bsk-[0-9A-Za-z_-]{20,}`)},
	{"a Hugging Face token", []string{"hf_"}, 0, regexp.MustCompile(`\bhf_[0-9A-Za-z]{30,}`)},
	{"an npm token", []string{"npm_"}, 0, regexp.MustCompile(`\bnpm_[0-9A-Za-z]{36}`)},
	{"a PyPI token", []string{"pypi-"}, 0, regexp.MustCompile(`\bpypi-[0-9A-Za-z_-]{50,}`)},
	{"a JSON web token", []string{"eyJ"}, 16 << 10, regexp.MustCompile(`\beyJ[0-9A-Za-z_-]{10,}\.eyJ[0-9A-Za-z_-]{10,}\.[0-9A-Za-z_-]{10,}`)},
	{"a password in an address", nil, 0, nil},
}

// tokenAt is the place of a token: the offset, and what kind it is.
func tokenAt(b []byte) (at int, kind string) {
	for _, t := range tokens {
		at := -1
		if t.form == nil {
			at = addressAt(b)
		}
		around(b, t.anchors, t.reach, func(from, to int) bool {
			if loc := t.form.FindIndex(b[from:to]); loc != nil {
				at = from + loc[0]
			}
			return at >= 0
		})
		if at >= 0 {
			return at, t.kind
		}
	}
	return 0, ""
}

func token(b []byte) (kind string) {
	_, kind = tokenAt(b)
	return kind
}

func findToken(b []byte) (line int, kind string) {
	at, kind := tokenAt(b)
	if kind == "" {
		return 0, ""
	}
	return lineOf(b, at), kind
}

func lineOf(b []byte, at int) int { return 1 + bytes.Count(b[:at], []byte("\n")) }

// named finds values that are given a telling name; names are the anchors of it.
var (
	named = regexp.MustCompile(`(?i)([a-z0-9_.-]*(?:secret|token|passwd|password|api[_-]?key|access[_-]?key|credential|_auth|authorization)[a-z0-9_.-]*)["']?\s*[:=]\s*["']?(?:bearer |basic )?([^\s"',;<>{}$]{8,})`)
	names = []string{"secret", "token", "passwd", "password", "apikey", "api_key", "api-key", "accesskey", "access_key", "access-key", "credential", "_auth", "authorization"}
)

// eachNamed calls fn for where named matches, as it does, until fn returns true.
func eachNamed(b []byte, fn func(m []int) bool) {
	around(lower(b), names, 0, func(from, to int) bool {
		for _, m := range named.FindAllSubmatchIndex(b[from:to], maxWords) {
			for i := range m {
				m[i] += from
			}
			if fn(m) {
				return true
			}
		}
		return false
	})
}

// holdsCredential decides for a file in which one is expected now and then.
func holdsCredential(b []byte) (found bool) {
	if token(b) != "" {
		return true
	}
	eachNamed(b, func([]int) bool { found = true; return true })
	return found
}

const (
	maxEntropic = 256 << 10 // bytes of a file that is looked at for what seems random
	minRandom   = 3.5       // bits for each character of a named value
	veryRandom  = 4.5       // of any word
	longWord    = 40        // bytes
	maxWords    = 64        // values, and words, of a file that are looked at
)

// proseOrSource are endings of files in which random words are usual.
var proseOrSource = map[string]bool{".lock": true, ".sum": true, ".svg": true, ".map": true, ".csv": true, ".tsv": true, ".jsonl": true, ".diff": true,
	".patch": true, ".asc": true, ".html": true, ".js": true, ".css": true, ".ipynb": true, ".bib": true}

// findEntropic finds a value that looks random under a telling name, or a long
// word that does in a small file that is no source.
func findEntropic(b []byte, base string) (line int, what string) {
	seen := 0
	eachNamed(b, func(m []int) bool {
		value := b[m[4]:m[5]]
		if len(value) >= 16 && entropy(value) >= minRandom && !looksLikeCode(value) {
			line, what = lineOf(b, m[0]), "a value that looks random, of "+strings.ToLower(string(b[m[2]:min(m[3], m[2]+40)]))
		}
		seen++
		return what != "" || seen == maxWords
	})
	if what != "" {
		return line, what
	}
	if dot := strings.LastIndexByte(base, '.'); dot >= 0 && proseOrSource[base[dot:]] || strings.Contains(base, "lock") || strings.Contains(base, "sums") {
		return 0, ""
	}
	if at := randomWord(b); at >= 0 {
		return lineOf(b, at), "a long word that looks random"
	}
	return 0, ""
}

// randomWord is where the first long word begins that looks random, -1 if none.
func randomWord(b []byte) int {
	for seen, from := 0, 0; seen < maxWords && from < len(b); {
		to := from
		for to < len(b) && isWord[b[to]] {
			to++
		}
		if to-from >= longWord {
			if seen++; entropy(b[from:to]) >= veryRandom {
				return from
			}
		}
		from = to + 1
	}
	return -1
}

// isWord are the bytes of encoded values.
var isWord = func() (is [256]bool) {
	for _, c := range []byte("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+/_=-") {
		is[c] = true
	}
	return is
}()

// looksLikeCode: names and calls are no secrets.
func looksLikeCode(v []byte) bool { return bytes.ContainsAny(v, "()[]") }

// entropy in bits for each byte.
func entropy(b []byte) float64 {
	var count [256]int
	for _, c := range b {
		count[c]++
	}
	e := 0.0
	for _, n := range count {
		if n > 0 {
			f := float64(n) / float64(len(b))
			e -= f * math.Log2(f)
		}
	}
	return e
}
