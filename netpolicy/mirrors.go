package netpolicy

import (
	"net/netip"
	"slices"

	"github.com/opendsec/dsec"
)

// MirrorDomain is below which the services of the mirror of packages have their
// names. Nobody else has it: names end with a top-level domain that exists.
const MirrorDomain = "mirror.dsec"

// MirrorPort is where the mirror is, at the gateway.
const MirrorPort = 80

// MirrorHost is the name of a service.
func MirrorHost(service string) string { return service + "." + MirrorDomain }

// debianHosts are names of Debian's own that lead to the mirror where it is open, so
// that apt needs no other configuration than that of any image.
var debianHosts = []string{"deb.debian.org", "security.debian.org"}

// MirrorService is the service that a canonical name is of.
func MirrorService(name string) (service string, ok bool) {
	if slices.Contains(debianHosts, name) {
		return "debian", true
	}
	for _, s := range dsec.Mirrors {
		if name == MirrorHost(s) {
			return s, true
		}
	}
	return "", false
}

// mirror is what a mirror serves.
func mirror(a netip.Addr) Prefix {
	return Prefix{netip.PrefixFrom(a, a.BitLen()), []Ports{{tcp, MirrorPort, MirrorPort}}}
}

// MirrorAt is where a canonical name leads if it is one of the mirror's, and open.
// What a rule opens by that name is what it is outside.
func (p Plan) MirrorAt(name string) (netip.Addr, bool) {
	s, ok := MirrorService(name)
	if !ok || !slices.Contains(p.Mirrors, s) || len(p.Opens(name)) > 0 {
		return netip.Addr{}, false
	}
	return p.Mirror, true
}

// WithMirror adds what leads package managers to the mirror, where the policy opens it: over
// what the image says. What the caller of a command says goes over it.
func WithMirror(image []string, p dsec.NetworkPolicy) []string {
	out := slices.Clone(image)
	for k, v := range MirrorEnvironment(p) {
		out = append(out, k+"="+v)
	}
	return out
}

// MirrorEnvironment is what makes package managers of a sandbox ask the mirror.
// apt is led there by name.
func MirrorEnvironment(p dsec.NetworkPolicy) map[string]string {
	env, open := map[string]string{}, p.MirrorServices()
	at := func(service string) string { return "http://" + MirrorHost(service) }
	if slices.Contains(open, "pypi") {
		index, host := at("pypi")+"/simple/", MirrorHost("pypi")
		env["PIP_INDEX_URL"], env["PIP_TRUSTED_HOST"] = index, host
		env["UV_DEFAULT_INDEX"], env["UV_INDEX_URL"], env["UV_INSECURE_HOST"] = index, index, host
	}
	if slices.Contains(open, "npm") {
		env["npm_config_registry"] = at("npm") + "/"
		env["YARN_NPM_REGISTRY_SERVER"], env["YARN_UNSAFE_HTTP_WHITELIST"] = at("npm"), MirrorHost("npm")
	}
	if slices.Contains(open, "go") {
		env["GOPROXY"], env["GOSUMDB"] = at("go"), "sum.golang.org" // which is asked through GOPROXY
	}
	return env
}
