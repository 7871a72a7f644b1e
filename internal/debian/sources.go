package debian

import (
	"bytes"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// Source is one suite of one archive, as apt is told of it.
type Source struct {
	URI        string // of the archive, without a slash at its end
	Suite      string // as it is named in the configuration
	Components []string
	SignedBy   string // the path of a keyring; "": whoever apt trusts
	Embedded   bool   // the key is in the configuration itself
	From       string // the file that says so
}

// ReadSources reads apt's configuration directory (/etc/apt): sources.list,
// sources.list.d/*.list and *.sources, in the order of their names. Only
// archives of binary packages that are reached by http or https are returned.
// That apt would trust an archive without a signature (trusted=yes) is not
// heeded.
func ReadSources(dir string) ([]Source, error) {
	names := []string{filepath.Join(dir, "sources.list")}
	for _, pattern := range []string{"*.list", "*.sources"} {
		m, err := filepath.Glob(filepath.Join(dir, "sources.list.d", pattern))
		if err != nil {
			return nil, dsec.E(dsec.Invalid, "read sources of apt", dir, err)
		}
		names = append(names, m...)
	}
	slices.Sort(names[1:])
	var all []Source
	for _, name := range names {
		text, err := readCapped(name, maxSources)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, dsec.E(dsec.Invalid, "read sources of apt", name, err)
		}
		parse := parseList
		if strings.HasSuffix(name, ".sources") {
			parse = parseSources
		}
		found, err := parse(text, name)
		if err != nil {
			return nil, dsec.E(dsec.Invalid, "read sources of apt", name, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

func readCapped(name string, limit int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(&capped{f, limit, fmt.Errorf("more than %d bytes", limit)})
}

// parseList reads lines: deb [option=value …] URI suite component…
func parseList(text []byte, from string) (all []Source, err error) {
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		kind, rest, _ := strings.Cut(line, " ")
		if line == "" || kind == "deb-src" {
			continue
		}
		if kind != "deb" {
			return nil, fmt.Errorf("line %d: neither deb nor deb-src", n)
		}
		options := map[string]string{}
		rest = strings.TrimSpace(rest)
		if inner, ok := strings.CutPrefix(rest, "["); ok {
			inside, after, ok := strings.Cut(inner, "]")
			if !ok {
				return nil, fmt.Errorf("line %d: options without an end", n)
			}
			for o := range strings.FieldsSeq(inside) {
				k, v, _ := strings.Cut(o, "=")
				options[strings.ToLower(k)] = v
			}
			rest = after
		}
		words := strings.Fields(rest)
		if len(words) < 2 {
			return nil, fmt.Errorf("line %d: no URI and suite", n)
		}
		s := Source{Suite: words[1], Components: words[2:], SignedBy: options["signed-by"], From: from}
		if s.add(words[0]) {
			all = append(all, s)
		}
	}
	return all, nil
}

// parseSources reads stanzas of Types, URIs, Suites, Components.
func parseSources(text []byte, from string) (all []Source, err error) {
	err = eachStanza(bytes.NewReader(text), from, func(text []byte) error {
		f, err := parseStanza(text, from)
		if err != nil {
			return err
		}
		if len(f) == 0 || !slices.Contains(strings.Fields(f["types"]), "deb") || isNo(f["enabled"]) {
			return nil
		}
		if f["uris"] == "" || f["suites"] == "" {
			return fmt.Errorf("a stanza without URIs and Suites")
		}
		for uri := range strings.FieldsSeq(f["uris"]) {
			for suite := range strings.FieldsSeq(f["suites"]) {
				s := Source{Suite: suite, Components: strings.Fields(f["components"]), From: from}
				if s.Embedded = strings.Contains(f["signed-by"], "\n"); !s.Embedded {
					s.SignedBy = f["signed-by"]
				}
				if s.add(uri) {
					all = append(all, s)
				}
			}
		}
		return nil
	})
	return all, err
}

func isNo(v string) bool {
	return slices.Contains([]string{"no", "false", "without", "off", "disable"}, strings.ToLower(v))
}

// add completes the source with its archive, unless that is not reached by http.
func (s *Source) add(uri string) bool {
	u, err := url.Parse(uri)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return false
	}
	s.URI = strings.TrimRight(uri, "/")
	return true
}

// IsOf reports whether Open asks a source for this release: it is a part of it,
// and not signed by others than the keyring has.
func (s Source) IsOf(codename, keyring string) bool { return s.serves(codename) && !s.others(keyring) }

// serves reports whether a source is a part of the release with this codename.
func (s Source) serves(codename string) bool {
	rest, ok := strings.CutPrefix(s.Suite, codename)
	return ok && (rest == "" || rest[0] == '-') && !strings.Contains(rest, "backports") && slices.Contains(s.Components, "main")
}

// others reports whether the configuration names another's keys for a source.
// Debian's own are in several files.
func (s Source) others(keyring string) bool {
	return s.Embedded || s.SignedBy != "" && !slices.ContainsFunc(strings.Split(s.SignedBy, ","), func(file string) bool {
		return file == keyring || strings.HasPrefix(filepath.Base(file), "debian-archive-")
	})
}
