package mirror

import (
	"context"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
)

// maxVersions of a module: each is asked for its time.
const maxVersions = 5000

var (
	goPath  = regexp.MustCompile(`^[a-z0-9!~._-]+(/[a-z0-9!~._-]+)*$`) // escaped: "!x" is "X"
	goQuery = regexp.MustCompile(`^[a-z0-9!~._+-]+$`)                  // escaped, too
)

// goModules serves a module proxy: MODULE/@v/list, MODULE/@v/VERSION.{info,mod,zip},
// MODULE/@latest, and its checksum database.
func (m *Mirror) goModules(q *request) error {
	const op = "serve go"
	if db, ok := strings.CutPrefix(q.path, "sumdb/"); ok {
		return m.sumDB(q, db)
	}
	escaped, what := splitGo(q.path)
	if what == "" || !goPath.MatchString(escaped) {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(q.path), "want MODULE/@v/… or MODULE/@latest")
	}
	if err := deniedGo(&q.access, escaped); err != nil {
		return err
	}
	switch {
	case what == "@latest":
		return m.goLatest(q, escaped)
	case what == "@v/list":
		list, err := m.goVersions(q.r.Context(), escaped, &q.access)
		if err != nil {
			return err
		}
		return q.answer("text/plain; charset=utf-8", []byte(strings.Join(append(list, ""), "\n")), false)
	}
	version, kind := cutLast(strings.TrimPrefix(what, "@v/"), '.')
	if !goQuery.MatchString(version) || !slices.Contains([]string{"info", "mod", "zip"}, kind) {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(q.path), "want @v/VERSION.info, .mod or .zip")
	}
	if kind != "info" && !isGoVersion(version) {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(version), "not a version: ask for its .info first")
	}
	if kind == "info" || !q.access.Cutoff.IsZero() {
		info, raw, err := m.goInfo(q.r.Context(), escaped, version)
		switch {
		case err != nil:
			return err
		case q.access.hides(info.Time):
			return hiddenGo(escaped, version)
		case kind == "info":
			return q.answer("application/json", raw, false)
		}
	}
	base, err := m.base("go")
	if err != nil {
		return err
	}
	at := below(base, escaped+"/@v/"+version+"."+kind)
	if kind == "zip" {
		return m.serveFile(q, file{at: at, contentType: "application/zip"})
	}
	doc, err := m.document(q.r.Context(), wanted{at: at, forever: true})
	if err != nil {
		return err
	}
	return q.answer("text/plain; charset=utf-8", doc.body, false)
}

func hiddenGo(escaped, version string) error {
	return dsec.Errorf(dsec.NotFound, "serve go", escaped+"@"+version, "no such version, or it is newer than the cut-off")
}

// splitGo parts a path after the name of a module.
func splitGo(path string) (module, what string) {
	if i := strings.Index(path, "/@"); i > 0 {
		return path[:i], path[i+1:]
	}
	return path, ""
}

func cutLast(s string, at byte) (before, after string) {
	i := strings.LastIndexByte(s, at)
	if i < 0 {
		return s, ""
	}
	return s[:i], s[i+1:]
}

// deniedGo: a denied module is so with all below it, whatever its case: some hosts
// take any.
func deniedGo(a *Access, escaped string) error {
	name := strings.ReplaceAll(escaped, "!", "") // letters are lower then
	if a.denied("go", func(d string) bool {
		d = strings.ToLower(d)
		return name == d || strings.HasPrefix(name, d+"/")
	}) {
		return dsec.Errorf(dsec.PermissionDenied, "serve go", name, "denied to this sandbox")
	}
	return nil
}

// isGoVersion says whether it is a version for ever, and not the name of a branch.
// It is escaped: versions with capitals have a "!".
func isGoVersion(v string) bool {
	s, ok := strings.CutPrefix(v, "v")
	_, is := parseSemver(s)
	return ok && is
}

// goInfo is what a proxy says of a version.
type goInfo struct {
	Version string
	Time    time.Time
}

func readGoInfo(body []byte) (i goInfo, err error) {
	if err = json.Unmarshal(body, &i); err == nil && i.Version == "" {
		err = dsec.Errorf(dsec.Unavailable, "read version", "", "it has none")
	}
	return i, err
}

// goInfo asks what a version is; of a branch, what it is now. A version never
// changes.
func (m *Mirror) goInfo(ctx context.Context, escaped, version string) (goInfo, []byte, error) {
	base, err := m.base("go")
	if err != nil {
		return goInfo{}, nil, err
	}
	var i goInfo
	doc, err := m.document(ctx, wanted{at: below(base, escaped+"/@v/"+version+".info"), forever: isGoVersion(version),
		check: func(b []byte) error { _, err := readGoInfo(b); return err }})
	if err == nil {
		i, err = readGoInfo(doc.body)
	}
	if err != nil {
		return i, nil, dsec.E(classOr(err, dsec.Unavailable), "find version", escaped+"@"+version, err)
	}
	// What else upstream says (where it comes from) may tell of what is newer.
	return i, toJSON(i), nil
}

// goVersions lists what may be seen of a module, in upstream's order.
func (m *Mirror) goVersions(ctx context.Context, escaped string, a *Access) ([]string, error) {
	base, err := m.base("go")
	if err != nil {
		return nil, err
	}
	doc, err := m.document(ctx, wanted{at: below(base, escaped+"/@v/list")})
	if err != nil {
		return nil, err
	}
	var all []string
	for v := range strings.FieldsSeq(string(doc.body)) {
		if isGoVersion(v) && goQuery.MatchString(escapeGo(v)) {
			all = append(all, v)
		}
	}
	if a.Cutoff.IsZero() {
		return all, nil
	}
	if len(all) > maxVersions {
		return nil, dsec.Errorf(dsec.Unavailable, "list versions", escaped, "%d, at most %d can be dated", len(all), maxVersions)
	}
	shown := make([]bool, len(all))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i, v := range all {
		g.Go(func() error {
			info, _, err := m.goInfo(ctx, escaped, escapeGo(v))
			if dsec.ClassOf(err) == dsec.NotFound {
				return nil
			}
			shown[i] = err == nil && !a.hides(info.Time)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var out []string
	for i, v := range all {
		if shown[i] {
			out = append(out, v)
		}
	}
	return out, nil
}

// escapeGo writes capitals as paths have them.
func escapeGo(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		if c >= 'A' && c <= 'Z' {
			b.WriteByte('!')
			c += 'a' - 'A'
		}
		b.WriteByte(c)
	}
	return b.String()
}

// goLatest is the highest release that may be seen, or the highest version; of a
// module without any what upstream says, if that may be.
func (m *Mirror) goLatest(q *request, escaped string) error {
	list, err := m.goVersions(q.r.Context(), escaped, &q.access)
	if err != nil && dsec.ClassOf(err) != dsec.NotFound {
		return err
	}
	if best := newestGo(list); best != "" {
		_, raw, err := m.goInfo(q.r.Context(), escaped, escapeGo(best))
		if err != nil {
			return err
		}
		return q.answer("application/json", raw, false)
	}
	base, err := m.base("go")
	if err != nil {
		return err
	}
	doc, err := m.document(q.r.Context(), wanted{at: below(base, escaped+"/@latest")})
	if err != nil {
		return err
	}
	info, err := readGoInfo(doc.body)
	if err != nil {
		return dsec.E(dsec.Unavailable, "find latest", escaped, err)
	}
	if q.access.hides(info.Time) {
		return hiddenGo(escaped, "latest")
	}
	return q.answer("application/json", toJSON(info), doc.stale)
}

// newestGo is the highest: releases of modules first, then those from before
// modules, then what is not released.
func newestGo(list []string) (best string) {
	rank := func(v string) int {
		x, _ := parseSemver(v[1:])
		switch {
		case x.pre != "":
			return 0
		case strings.HasSuffix(v, "+incompatible"):
			return 1
		}
		return 2
	}
	for _, v := range list {
		if best == "" {
			best = v
			continue
		}
		x, _ := parseSemver(v[1:])
		b, _ := parseSemver(best[1:])
		if r, rb := rank(v), rank(best); r > rb || r == rb && x.compare(b) > 0 {
			best = v
		}
	}
	return best
}

var goTile = regexp.MustCompile(`^tile/[0-9]{1,2}/[0-9]{1,2}/(x[0-9]{3}/)*[0-9]{3}(\.p/[0-9]{1,3})?$`)

// sumDB passes on what the go command asks a checksum database. Its signatures are
// checked by who asks. A version that is hidden has no checksum either; tiles of
// records, which list names of versions, are not offered.
func (m *Mirror) sumDB(q *request, path string) error {
	const op = "serve checksum database"
	base, err := m.base("sumdb")
	if err != nil {
		return err
	}
	name, what, _ := strings.Cut(path, "/")
	if name != base.Host {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(name), "this mirror passes on %s", base.Host)
	}
	w := wanted{at: below(base, what)}
	lookup, isLookup := strings.CutPrefix(what, "lookup/")
	switch {
	case what == "supported":
		return q.answer("text/plain; charset=utf-8", nil, false)
	case what == "latest":
	case isLookup:
		module, version, ok := strings.Cut(lookup, "@")
		if !ok || !goPath.MatchString(module) || !goQuery.MatchString(version) || !isGoVersion(version) {
			return dsec.Errorf(dsec.NotFound, op, dsec.Quote(lookup), "want MODULE@VERSION")
		}
		if err := deniedGo(&q.access, module); err != nil {
			return err
		}
		if !q.access.Cutoff.IsZero() {
			info, _, err := m.goInfo(q.r.Context(), module, version)
			if err != nil {
				return err
			}
			if q.access.hides(info.Time) {
				return hiddenGo(module, version)
			}
		}
	case goTile.MatchString(what):
		w.forever = true
	default:
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(what), "not offered")
	}
	doc, err := m.document(q.r.Context(), w)
	if err != nil {
		return err
	}
	return q.answer("application/octet-stream", doc.body, doc.stale)
}
