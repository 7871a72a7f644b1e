package mirror

import (
	"encoding/json"
	"errors"
	"html"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// pypiJSON is the simple index as PEP 691 has it; with times since PEP 700.
const pypiJSON = "application/vnd.pypi.simple.v1+json"

const pypiHTML = "application/vnd.pypi.simple.v1+html"

var (
	pypiName  = regexp.MustCompile(`^([a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9._-]*[a-zA-Z0-9])$`)
	pypiRun   = regexp.MustCompile(`[-_.]+`)
	pypiFile  = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._+!-]*$`)
	hexSHA256 = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// NormalPyPI is a project's one name, as PEP 503 has it.
func NormalPyPI(name string) string {
	return strings.ToLower(pypiRun.ReplaceAllString(name, "-"))
}

// pypi serves simple/NAME/ and files/NAME/FILE.
func (m *Mirror) pypi(q *request) error {
	const op = "serve pypi"
	base, err := m.base("pypi")
	if err != nil {
		return err
	}
	parts := strings.Split(q.path, "/")
	kind := parts[0]
	switch {
	case kind == "simple" && len(parts) >= 2 && parts[1] != "" && (len(parts) == 2 || len(parts) == 3 && parts[2] == ""):
	case kind == "files" && len(parts) == 3:
	case kind == "simple", kind == "pypi":
		return dsec.Errorf(dsec.PermissionDenied, op, dsec.Quote(q.path), "not offered: only simple/NAME/ is, as it alone can be shown as of a time")
	default:
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(q.path), "want simple/NAME/")
	}
	if !pypiName.MatchString(parts[1]) {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(parts[1]), "not the name of a project")
	}
	name := NormalPyPI(parts[1])
	if q.access.denied("pypi", func(d string) bool { return NormalPyPI(d) == name }) {
		return dsec.Errorf(dsec.PermissionDenied, op, name, "denied to this sandbox")
	}
	if kind == "simple" && (len(parts) == 2 || parts[1] != name) {
		http.Redirect(q.w, q.r, "/simple/"+name+"/", http.StatusMovedPermanently)
		return nil
	}
	leave, err := q.hold()
	if err != nil {
		return err
	}
	defer leave()
	doc, err := m.document(q.r.Context(), wanted{at: below(base, "simple/"+name+"/"), accept: pypiJSON})
	if err != nil {
		return err
	}
	var index pypiIndex
	if err := m.parse(q.r.Context(), func() (err error) { index, err = filterPyPI(doc.body, name, &q.access); return err }); err != nil {
		return dsec.E(classOr(err, dsec.Unavailable), op, name, err)
	}
	if kind == "files" {
		leave()
		return m.pypiFile(q, &index, parts[2])
	}
	if len(index.Files) == 0 && !q.access.Cutoff.IsZero() {
		return dsec.Errorf(dsec.NotFound, op, name, "no file at or before %s", q.access.Cutoff.UTC().Format(time.RFC3339))
	}
	q.w.Header().Set("Vary", "Accept")
	switch kind := pypiKind(q.r.Header.Values("Accept")); kind {
	case pypiJSON:
		return q.answer(pypiJSON, index.json(), doc.stale)
	default:
		return q.answer(kind, index.html(), doc.stale)
	}
}

// classOr is the class of an error, or another if it has none.
func classOr(err error, other dsec.Class) dsec.Class {
	if c := dsec.ClassOf(err); c != dsec.Internal {
		return c
	}
	return other
}

// pypiFile serves a file that the index still has, or its metadata.
func (m *Mirror) pypiFile(q *request, index *pypiIndex, filename string) error {
	wheel, isMeta := strings.CutSuffix(filename, ".metadata")
	i := slices.IndexFunc(index.Files, func(f pypiEntry) bool { return f.Filename == filename || isMeta && f.Filename == wheel })
	if i < 0 || isMeta && index.Files[i].meta == "" {
		return dsec.Errorf(dsec.NotFound, "serve pypi", index.Name+"/"+filename, "no such file, or it is newer than the cut-off")
	}
	f := index.Files[i]
	at := *f.at
	sum := f.Hashes["sha256"]
	if isMeta {
		at.Path, at.RawPath, sum = at.Path+".metadata", "", f.meta
	}
	return m.serveFile(q, file{&at, digest{"sha256", sum}, "application/octet-stream"})
}

// pypiIndex is what is shown of a project.
type pypiIndex struct {
	Meta struct {
		Version string `json:"api-version"`
	} `json:"meta"`
	Name     string      `json:"name"`
	Versions []string    `json:"versions,omitempty"`
	Files    []pypiEntry `json:"files"`
}

// pypiEntry is what is shown of a file; other fields are not.
type pypiEntry struct {
	Filename       string            `json:"filename"`
	URL            string            `json:"url"`
	Hashes         map[string]string `json:"hashes"`
	RequiresPython string            `json:"requires-python,omitempty"`
	Size           int64             `json:"size,omitempty"`
	Uploaded       string            `json:"upload-time,omitempty"`
	Yanked         any               `json:"yanked,omitempty"` // true, or why
	CoreMetadata   any               `json:"core-metadata,omitempty"`
	DistMetadata   any               `json:"dist-info-metadata,omitempty"` // as tools from before PEP 714 have it

	at   *url.URL // upstream
	meta string   // sha256 of the metadata; "": not to be had
}

// filterPyPI shows of an index what may be seen. A file without a sha256 cannot be
// served, and is not shown.
func filterPyPI(body []byte, name string, a *Access) (pypiIndex, error) {
	out := pypiIndex{Name: name, Files: []pypiEntry{}}
	out.Meta.Version = "1.1"
	var in struct {
		Name     string            `json:"name"`
		Versions []string          `json:"versions"`
		Files    []json.RawMessage `json:"files"`
	}
	if err := json.Unmarshal(body, &in); err != nil {
		return out, dsec.Errorf(dsec.Unavailable, "read index", name, "upstream does not give the JSON of PEP 691: %w", err)
	}
	if NormalPyPI(in.Name) != name {
		return out, dsec.Errorf(dsec.Unavailable, "read index", name, "it is of %s", dsec.Quote(in.Name))
	}
	shown, seen := map[string]bool{}, map[string]bool{}
	for _, raw := range in.Files {
		var f pypiEntry
		if json.Unmarshal(raw, &f) != nil || !f.read(name) || seen[f.Filename] {
			continue // one that cannot be served
		}
		seen[f.Filename] = true
		at, _ := time.Parse(time.RFC3339, f.Uploaded)
		if a.hides(at) {
			continue
		}
		out.Files = append(out.Files, f)
		shown[pypiVersion(name, f.Filename)] = true
	}
	for _, v := range in.Versions {
		if a.Cutoff.IsZero() || shown[strings.ToLower(v)] {
			out.Versions = append(out.Versions, v)
		}
	}
	return out, nil
}

// read makes what is shown of what upstream says.
func (f *pypiEntry) read(name string) bool {
	sum := f.Hashes["sha256"]
	var err error
	if !pypiFile.MatchString(f.Filename) || len(f.Filename) > 512 || strings.HasSuffix(f.Filename, ".metadata") || !hexSHA256.MatchString(sum) {
		return false
	}
	if f.at, err = url.Parse(f.URL); err != nil || f.at.Host == "" {
		return false
	}
	f.at.Fragment, f.at.RawQuery = "", ""
	f.URL, f.Hashes = "/files/"+name+"/"+f.Filename, map[string]string{"sha256": sum}
	for _, v := range []any{f.CoreMetadata, f.DistMetadata} {
		if h, ok := v.(map[string]any); ok {
			if s, ok := h["sha256"].(string); ok && hexSHA256.MatchString(s) {
				f.meta = s
			}
		}
	}
	f.CoreMetadata, f.DistMetadata = nil, nil
	if f.meta != "" {
		has := map[string]string{"sha256": f.meta}
		f.CoreMetadata, f.DistMetadata = has, has
	}
	switch y := f.Yanked.(type) {
	case bool:
		if !y {
			f.Yanked = nil
		}
	case string:
	default:
		f.Yanked = nil
	}
	return true
}

// pypiVersion is the version in the name of a file, "" if it has none.
func pypiVersion(name, filename string) string {
	f := strings.ToLower(filename)
	if w, ok := strings.CutSuffix(f, ".whl"); ok {
		parts := strings.Split(w, "-")
		if len(parts) < 5 {
			return ""
		}
		return parts[1]
	}
	for _, ext := range []string{".tar.gz", ".zip", ".tar.bz2", ".tgz"} {
		if s, ok := strings.CutSuffix(f, ext); ok {
			for i := strings.LastIndexByte(s, '-'); i > 0; i = strings.LastIndexByte(s[:i], '-') {
				if NormalPyPI(s[:i]) == name {
					return s[i+1:]
				}
			}
		}
	}
	return ""
}

func (x *pypiIndex) json() []byte {
	b, _ := json.Marshal(x) // of strings
	return b
}

func (x *pypiIndex) html() []byte {
	var b strings.Builder
	b.WriteString("<!DOCTYPE html>\n<html><head><meta name=\"pypi:repository-version\" content=\"1.1\"><title>" + html.EscapeString(x.Name) + "</title></head><body>\n")
	for _, f := range x.Files {
		b.WriteString(`<a href="` + html.EscapeString(f.URL) + `#sha256=` + f.Hashes["sha256"] + `"`)
		if f.RequiresPython != "" {
			b.WriteString(` data-requires-python="` + html.EscapeString(f.RequiresPython) + `"`)
		}
		switch y := f.Yanked.(type) {
		case bool:
			b.WriteString(` data-yanked=""`)
		case string:
			b.WriteString(` data-yanked="` + html.EscapeString(y) + `"`)
		}
		if f.meta != "" {
			b.WriteString(` data-core-metadata="sha256=` + f.meta + `" data-dist-info-metadata="sha256=` + f.meta + `"`)
		}
		b.WriteString(">" + html.EscapeString(f.Filename) + "</a><br>\n")
	}
	b.WriteString("</body></html>\n")
	return []byte(b.String())
}

// pypiKind is the form that is asked for: HTML unless another is wanted more.
func pypiKind(accept []string) string {
	best, quality := "text/html", -1.0
	for part := range strings.SplitSeq(strings.Join(accept, ","), ",") {
		kind, params, _ := strings.Cut(part, ";")
		switch kind = strings.ToLower(strings.TrimSpace(kind)); kind {
		case "application/vnd.pypi.simple.latest+json":
			kind = pypiJSON
		case "application/vnd.pypi.simple.latest+html":
			kind = pypiHTML
		case "*/*", "text/*":
			kind = "text/html"
		case pypiJSON, pypiHTML, "text/html":
		default:
			continue
		}
		if q, err := qualityOf(params); err == nil && q > quality {
			best, quality = kind, q
		}
	}
	return best
}

func qualityOf(params string) (float64, error) {
	for p := range strings.SplitSeq(params, ";") {
		if v, ok := strings.CutPrefix(strings.TrimSpace(p), "q="); ok {
			q, err := strconv.ParseFloat(v, 64)
			if err != nil || !(q >= 0 && q <= 1) {
				return 0, errors.New("no quality")
			}
			return q, nil
		}
	}
	return 1, nil
}
