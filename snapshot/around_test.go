package snapshot

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

// addresses is what addressAt finds, as an expression.
var addresses = regexp.MustCompile(`[a-z][a-z0-9+.-]*://[^/\s:@'"<>]*:[^/\s:@'"<>$%{]{3,}@[^\s'"]+`)

func TestAddressesAreFoundAsByAnExpression(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	parts := []string{"a", "://", "://", ":", ":", "@", "@", "xyz", "/", " ", "'", "$", "\n", "1+", "A", "%", "<", "https", "h.st", "a://b:xyz", "s+1://:xyz@"}
	found := 0
	for range 50_000 {
		var b strings.Builder
		for range 1 + r.IntN(14) {
			b.WriteString(parts[r.IntN(len(parts))])
		}
		want := -1
		if loc := addresses.FindStringIndex(b.String()); loc != nil {
			want, found = loc[0], found+1
		}
		if got := addressAt([]byte(b.String())); got != want {
			t.Fatalf("%q: at %d, want %d", b.String(), got, want)
		}
	}
	if found < 1000 {
		t.Errorf("only %d were any", found)
	}
}

// TestExpressionsRunAroundAnchors: over no more than the text, whatever it is, and
// over nothing where there is no anchor.
func TestExpressionsRunAroundAnchors(t *testing.T) {
	for _, c := range []struct {
		text string
		most int // bytes
	}{
		{strings.Repeat("nothing here\n", 10_000), 0},
		{strings.Repeat("x", 100_000) + "sk-" + strings.Repeat("x", 100_000), before + reach},
		{strings.Repeat("sk-", 50_000), 150_000},
		{strings.Repeat("sk-"+strings.Repeat("y", before+reach-10), 200), 200 * (before + reach)},
		{"sk-", 3},
	} {
		sum, last, anchors := 0, 0, 0
		around([]byte(c.text), []string{"sk-", "never"}, 0, func(from, to int) bool {
			if from < last || to <= from {
				t.Fatalf("%d to %d after %d", from, to, last)
			}
			last, sum, anchors = to, sum+to-from, anchors+strings.Count(c.text[from:to], "sk-")
			return false
		})
		if sum > c.most || anchors != strings.Count(c.text, "sk-") {
			t.Errorf("%.20q: %d bytes, at most %d; %d anchors", c.text, sum, c.most, anchors)
		}
	}
}

func TestTokensAreFoundWhereverTheyAre(t *testing.T) {
	jwt := "eyJ" + strings.Repeat("a", 40) + ".eyJ" + strings.Repeat("b", 5000) + "." + strings.Repeat("c", 43)
	for text, kind := range map[string]string{"AKIAABCDEFGHIJKLMNOP": "an AWS key", "xAKIAABCDEFGHIJKLMNOP": "", "ASIAABCDEFGHIJKLMNOPQ": "",
		"gho_" + strings.Repeat("1", 36): "a GitHub token", "rk_live_" + strings.Repeat("1", 16): "a Stripe key", jwt: "a JSON web token",
		"-----BEGIN OPENSSH PRIVATE KEY-----": "a private key", "task-" + strings.Repeat("a", 30): "", "postgres://me:secret@/db": "a password in an address",
		"http://example.com/a:bcd@e": ""} {
		for _, pad := range []string{"", strings.Repeat("sk- gh eyJ ://\n", 300), strings.Repeat("plain text\n", 9000)} {
			line, got := findToken([]byte(pad + text + " " + pad))
			if got != kind || kind != "" && line != 1+strings.Count(pad, "\n") {
				t.Errorf("%.30s behind %d bytes: %q in line %d", text, len(pad), got, line)
			}
		}
	}
	if line, what := findEntropic([]byte(strings.Repeat("token key\n", 3000)+"Db_PASSWORD: pq83hf-Zk29fjQ1x\n"), "x"); line != 3001 || what != "a value that looks random, of db_password" {
		t.Errorf("%q in line %d", what, line)
	}
}
