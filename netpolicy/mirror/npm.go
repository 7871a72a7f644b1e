package mirror

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// npmShort is a document with what an installation needs. It has no times, so
// upstream is asked for the long one, and ours is made of that.
const npmShort = "application/vnd.npm.install-v1+json"

var (
	npmName    = regexp.MustCompile(`^(@[a-zA-Z0-9~._-]+/)?[a-zA-Z0-9~_-][a-zA-Z0-9~._-]*$`)
	npmVersion = regexp.MustCompile(`^[0-9a-zA-Z][0-9a-zA-Z.+-]*$`)
)

// npm serves NAME, NAME/VERSION and NAME/-/FILE.tgz, where NAME may be @SCOPE/NAME.
func (m *Mirror) npm(q *request) error {
	const op = "serve npm"
	base, err := m.base("npm")
	if err != nil {
		return err
	}
	if q.path == "-/ping" {
		return q.answer("application/json", []byte("{}"), false)
	}
	name, rest := splitNPM(strings.TrimSuffix(q.path, "/"))
	if strings.HasPrefix(q.path, "-") {
		return dsec.Errorf(dsec.PermissionDenied, op, dsec.Quote(q.path), "not offered: searches show what is newer than a cut-off")
	}
	if len(name) > 214 || !npmName.MatchString(name) {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(name), "not the name of a package")
	}
	if q.access.denied("npm", func(d string) bool { return strings.EqualFold(d, name) }) {
		return dsec.Errorf(dsec.PermissionDenied, op, name, "denied to this sandbox")
	}
	leave, err := q.hold()
	if err != nil {
		return err
	}
	defer leave()
	doc, err := m.document(q.r.Context(), wanted{at: npmURL(base, name), accept: "application/json"})
	if err != nil {
		return err
	}
	var p packument
	if err := m.parse(q.r.Context(), func() (err error) { p, err = filterNPM(doc.body, name, &q.access); return err }); err != nil {
		return dsec.E(classOr(err, dsec.Unavailable), op, name, err)
	}
	if len(p.versions) == 0 {
		return dsec.Errorf(dsec.NotFound, op, name, "no version that this sandbox may have")
	}
	if file, ok := strings.CutPrefix(rest, "-/"); ok {
		leave()
		return m.npmFile(q, &p, file)
	}
	short := rest == "" && strings.Contains(strings.Join(q.r.Header.Values("Accept"), ","), npmShort)
	q.w.Header().Set("Vary", "Accept")
	body, err := p.render(rest, q.host, short)
	switch {
	case err != nil:
		return dsec.E(classOr(err, dsec.Unavailable), op, name, err)
	case short:
		return q.answer(npmShort, body, doc.stale)
	}
	return q.answer("application/json", body, doc.stale)
}

// splitNPM parts a path after the name of a package.
func splitNPM(path string) (name, rest string) {
	parts := 1
	if strings.HasPrefix(path, "@") {
		parts = 2
	}
	all := strings.SplitN(path, "/", parts+1)
	if len(all) <= parts {
		return path, ""
	}
	return strings.Join(all[:parts], "/"), all[parts]
}

// npmURL is where a registry has a package: the slash of a scope is escaped.
func npmURL(base *url.URL, name string) *url.URL {
	u := below(base, name)
	u.RawPath = strings.TrimSuffix(base.EscapedPath(), "/") + "/" + strings.ReplaceAll(name, "/", "%2F")
	return u
}

// npmFile serves the file of a version that may be seen.
func (m *Mirror) npmFile(q *request, p *packument, filename string) error {
	for v, x := range p.versions {
		if p.filename(v) == filename {
			return m.serveFile(q, file{x.at, x.digest, "application/octet-stream"})
		}
	}
	return dsec.Errorf(dsec.NotFound, "serve npm", p.name+"/-/"+filename, "no such file, or it is newer than the cut-off")
}

// packument is what is shown of a package.
type packument struct {
	name     string
	tags     map[string]string
	versions map[string]npmRelease
	created  string
	newest   time.Time // of what is shown
	text     string    // description of the version that latest is
}

// npmRelease is one version.
type npmRelease struct {
	fields map[string]json.RawMessage // as upstream has them
	dist   map[string]json.RawMessage
	time   string
	at     *url.URL
	digest digest
}

// filterNPM shows of a package what may be seen. A version without a digest cannot
// be served, and is not shown.
func filterNPM(body []byte, name string, a *Access) (packument, error) {
	p := packument{name: name, tags: map[string]string{}, versions: map[string]npmRelease{}}
	var in struct {
		Name     string                     `json:"name"`
		Tags     map[string]string          `json:"dist-tags"`
		Versions map[string]json.RawMessage `json:"versions"`
		Time     map[string]any             `json:"time"`
	}
	if err := json.Unmarshal(body, &in); err != nil {
		return p, dsec.E(dsec.Unavailable, "read index", name, err)
	}
	if in.Name != name {
		return p, dsec.Errorf(dsec.Unavailable, "read index", name, "it is of %s", dsec.Quote(in.Name))
	}
	p.created, _ = in.Time["created"].(string)
	for v, raw := range in.Versions {
		var r npmRelease
		r.time, _ = in.Time[v].(string)
		at, _ := time.Parse(time.RFC3339, r.time)
		if !npmVersion.MatchString(v) || a.hides(at) || json.Unmarshal(raw, &r.fields) != nil || !r.read() {
			continue
		}
		p.versions[v] = r
		if at.After(p.newest) {
			p.newest = at
		}
	}
	for tag, v := range in.Tags {
		if to := p.newestUpTo(v, tag == "latest"); to != "" {
			p.tags[tag] = to
		}
	}
	if latest, ok := p.versions[p.tags["latest"]]; ok {
		_ = json.Unmarshal(latest.fields["description"], &p.text)
	}
	return p, nil
}

// read finds the file of a version.
func (r *npmRelease) read() bool {
	var d struct{ Tarball, Integrity, Shasum string }
	if json.Unmarshal(r.fields["dist"], &d) != nil || json.Unmarshal(r.fields["dist"], &r.dist) != nil {
		return false
	}
	var err error
	if r.at, err = url.Parse(d.Tarball); err != nil || r.at.Host == "" {
		return false
	}
	r.digest = npmDigest(d.Integrity, d.Shasum)
	return r.digest.kind != ""
}

// npmDigest is the strongest that is given.
func npmDigest(integrity, shasum string) digest {
	sizes := map[string]int{"sha512": 64, "sha384": 48, "sha256": 32}
	for _, kind := range []string{"sha512", "sha384", "sha256"} {
		for one := range strings.FieldsSeq(integrity) {
			one, _, _ = strings.Cut(one, "?")
			text, ok := strings.CutPrefix(one, kind+"-")
			if sum, err := base64.StdEncoding.DecodeString(text); ok && err == nil && len(sum) == sizes[kind] {
				return digest{kind, hex.EncodeToString(sum)}
			}
		}
	}
	if sum, err := hex.DecodeString(shasum); err == nil && len(sum) == 20 {
		return digest{"sha1", hex.EncodeToString(sum)}
	}
	return digest{}
}

// newestUpTo is the version a tag leads to: the one it had, if that may be seen, or
// the highest before it; of latest a release, if there is any.
func (p *packument) newestUpTo(v string, release bool) string {
	if _, ok := p.versions[v]; ok {
		return v
	}
	most, ok := parseSemver(v)
	if !ok {
		return ""
	}
	best, bestIs := "", semver{}
	for w := range p.versions {
		x, ok := parseSemver(w)
		if !ok || x.compare(most) > 0 || release && x.pre != "" {
			continue
		}
		if c := x.compare(bestIs); best == "" || c > 0 || c == 0 && w > best {
			best, bestIs = w, x
		}
	}
	if best == "" && release {
		return p.newestUpTo(v, false)
	}
	return best
}

// filename is that of the file of a version, as we have it.
func (p *packument) filename(version string) string {
	return p.name[strings.LastIndexByte(p.name, '/')+1:] + "-" + version + ".tgz"
}

// npmShortFields are those of a version in the short document.
var npmShortFields = []string{"name", "version", "deprecated", "dependencies", "optionalDependencies", "devDependencies", "bundleDependencies",
	"bundledDependencies", "peerDependencies", "peerDependenciesMeta", "bin", "directories", "dist", "engines", "_hasShrinkwrap", "hasInstallScript",
	"os", "cpu", "libc", "funding"}

// release is a version as it is shown.
func (p *packument) release(v, host string, short bool) map[string]json.RawMessage {
	r, out := p.versions[v], map[string]json.RawMessage{}
	for k, raw := range r.fields {
		if !short || slices.Contains(npmShortFields, k) {
			out[k] = raw
		}
	}
	dist := map[string]json.RawMessage{}
	for k, raw := range r.dist {
		dist[k] = raw
	}
	dist["tarball"] = toJSON("http://" + host + "/" + p.name + "/-/" + p.filename(v))
	out["dist"] = toJSON(dist)
	return out
}

func toJSON(v any) json.RawMessage {
	b, _ := json.Marshal(v) // of what was read from JSON
	return b
}

// render makes a document: of a version or tag, or of all.
func (p *packument) render(one, host string, short bool) ([]byte, error) {
	if one != "" {
		if to, ok := p.tags[one]; ok {
			one = to
		}
		if _, ok := p.versions[one]; !ok {
			return nil, dsec.Errorf(dsec.NotFound, "find version", dsec.Quote(one), "no such version, or it is newer than the cut-off")
		}
		return toJSON(p.release(one, host, false)), nil
	}
	versions, times := map[string]any{}, map[string]string{}
	for v, r := range p.versions {
		versions[v] = p.release(v, host, short)
		if r.time != "" {
			times[v] = r.time
		}
	}
	out := map[string]any{"name": p.name, "dist-tags": p.tags, "versions": versions}
	modified := p.newest.UTC().Format("2006-01-02T15:04:05.000Z")
	if short {
		out["modified"] = modified
		return toJSON(out), nil
	}
	if p.created != "" {
		times["created"] = p.created
	}
	times["modified"] = modified
	out["_id"], out["time"] = p.name, times
	if p.text != "" {
		out["description"] = p.text
	}
	return toJSON(out), nil
}
