package snapshot

import (
	"bytes"
	"math"
	"regexp"
	"strings"
)

// What tokens of well-known services look like. The anchor is looked for
// first: a regular expression over every byte of a disk would take longer than
// packing it.
var tokens = []struct {
	kind, anchor string
	form         *regexp.Regexp
}{
	{"a private key", "PRIVATE KEY", regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----`)},
	{"an AWS key", "AKIA", regexp.MustCompile(`\bAKIA[0-9A-Z]{16}\b`)},
	{"an AWS key", "ASIA", regexp.MustCompile(`\bASIA[0-9A-Z]{16}\b`)},
	{"a GitHub token", "gh", regexp.MustCompile(`\bgh[pousr]_[0-9A-Za-z]{36,}`)},
	{"a GitHub token", "github_pat_", regexp.MustCompile(`\bgithub_pat_[0-9A-Za-z_]{40,}`)},
	{"a GitLab token", "glpat-", regexp.MustCompile(`\bglpat-[0-9A-Za-z_-]{20,}`)},
	{"a Slack token", "xox", regexp.MustCompile(`\bxox[abeoprs]-[0-9A-Za-z-]{10,}`)},
	{"a Google key", "AIza", regexp.MustCompile(`\bAIza[0-9A-Za-z_-]{35}`)},
	{"a Stripe key", "_live_", regexp.MustCompile(`\b[rs]k_live_[0-9A-Za-z]{16,}`)},
	{"an API key", "sk-", regexp.MustCompile(`\bsk-[0-9A-Za-z_-]{20,}`)},
	{"a Hugging Face token", "hf_", regexp.MustCompile(`\bhf_[0-9A-Za-z]{30,}`)},
	{"an npm token", "npm_", regexp.MustCompile(`\bnpm_[0-9A-Za-z]{36}`)},
	{"a PyPI token", "pypi-", regexp.MustCompile(`\bpypi-[0-9A-Za-z_-]{50,}`)},
	{"a JSON web token", "eyJ", regexp.MustCompile(`\beyJ[0-9A-Za-z_-]{10,}\.eyJ[0-9A-Za-z_-]{10,}\.[0-9A-Za-z_-]{10,}`)},
	{"a password in an address", "://", regexp.MustCompile(`[a-z][a-z0-9+.-]*://[^/\s:@'"<>]*:[^/\s:@'"<>$%{]{3,}@[^\s'"]+`)},
}

// place of a token: the offset, and what kind it is.
func tokenAt(b []byte) (at int, kind string) {
	for _, t := range tokens {
		if !bytes.Contains(b, []byte(t.anchor)) {
			continue
		}
		if loc := t.form.FindIndex(b); loc != nil {
			return loc[0], t.kind
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
	return 1 + bytes.Count(b[:at], []byte("\n")), kind
}

// named finds values that are given a telling name.
var named = regexp.MustCompile(`(?i)([a-z0-9_.-]*(?:secret|token|passwd|password|api[_-]?key|access[_-]?key|credential|_auth|authorization)[a-z0-9_.-]*)["']?\s*[:=]\s*["']?(?:bearer |basic )?([^\s"',;<>{}$]{8,})`)

// holdsCredential decides for a file in which one is expected now and then.
func holdsCredential(b []byte) bool { return token(b) != "" || named.Match(b) }

const (
	maxEntropic = 256 << 10 // bytes of a file that is looked at for what seems random
	minRandom   = 3.5       // bits for each character of a named value
	veryRandom  = 4.5       // of any word
)

var word = regexp.MustCompile(`[0-9A-Za-z+/_=-]{40,}`)

// proseOrSource are endings of files in which random words are usual.
var proseOrSource = map[string]bool{".lock": true, ".sum": true, ".svg": true, ".map": true, ".csv": true, ".tsv": true, ".jsonl": true, ".diff": true,
	".patch": true, ".asc": true, ".html": true, ".js": true, ".css": true, ".ipynb": true, ".bib": true}

// findEntropic finds a value that looks random under a telling name, or a long
// word that does in a small file that is no source.
func findEntropic(b []byte, base string) (line int, what string) {
	for _, m := range named.FindAllSubmatchIndex(b, 64) {
		value := b[m[4]:m[5]]
		if len(value) >= 16 && entropy(value) >= minRandom && !looksLikeCode(value) {
			return 1 + bytes.Count(b[:m[0]], []byte("\n")), "a value that looks random, of " + strings.ToLower(string(b[m[2]:min(m[3], m[2]+40)]))
		}
	}
	if dot := strings.LastIndexByte(base, '.'); dot >= 0 && proseOrSource[base[dot:]] || strings.Contains(base, "lock") || strings.Contains(base, "sums") {
		return 0, ""
	}
	for _, m := range word.FindAllIndex(b, 64) {
		if entropy(b[m[0]:m[1]]) >= veryRandom {
			return 1 + bytes.Count(b[:m[0]], []byte("\n")), "a long word that looks random"
		}
	}
	return 0, ""
}

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
