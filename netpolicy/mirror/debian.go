package mirror

import (
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
)

var debianHash = regexp.MustCompile(`/by-hash/SHA256/([0-9a-f]{64})$`)

// debian serves debian/… and debian-security/… as they are: what is there is signed
// with a list of its digests, and has no time that would hide a part of it.
func (m *Mirror) debian(q *request) error {
	const op = "serve debian"
	archive, path, _ := strings.Cut(q.path, "/")
	if archive != "debian" && archive != "debian-security" {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(q.path), "want debian/… or debian-security/…")
	}
	base, err := m.base(archive)
	if err != nil {
		return err
	}
	at := below(base, path)
	switch {
	case strings.HasSuffix(path, "/") || path == "":
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(q.path), "directories are not listed")
	case strings.HasPrefix(path, "pool/"):
		if name := debianName(path); q.access.denied("debian", func(d string) bool { return strings.EqualFold(d, name) }) {
			return dsec.Errorf(dsec.PermissionDenied, op, name, "denied to this sandbox")
		}
		return m.serveFile(q, file{at: at, contentType: "application/octet-stream"})
	case strings.HasPrefix(path, "dists/"):
		f := debianHash.FindStringSubmatch(path)
		if f != nil {
			return m.serveFile(q, file{at, digest{"sha256", f[1]}, "application/octet-stream"})
		}
		doc, err := m.document(q.r.Context(), wanted{at: at})
		if err != nil {
			return err
		}
		return q.answer("application/octet-stream", doc.body, doc.stale)
	}
	return dsec.Errorf(dsec.NotFound, op, dsec.Quote(q.path), "want dists/… or pool/…")
}

// debianName is the package of a file "NAME_VERSION_….deb".
func debianName(path string) string {
	_, file := cutLast(path, '/')
	name, _, _ := strings.Cut(file, "_")
	return strings.ToLower(name)
}
