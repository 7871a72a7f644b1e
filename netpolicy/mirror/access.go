package mirror

import (
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// AccessOf is what a policy gives of the mirror; ok is false for one that gives
// nothing.
func AccessOf(p dsec.NetworkPolicy) (a Access, ok bool) {
	a = Access{Services: p.MirrorServices(), Cutoff: p.Cutoff}
	for _, d := range p.MirrorDeny {
		service, name, _ := strings.Cut(d, ":")
		if a.Deny == nil {
			a.Deny = map[string][]string{}
		}
		a.Deny[service] = append(a.Deny[service], name)
	}
	return a, len(a.Services) > 0
}

// Environment is what makes package managers of a sandbox ask the mirror.
func Environment(services []string) map[string]string {
	env := map[string]string{}
	at := func(service string) string { return "http://" + Host(service) }
	if slices.Contains(services, "pypi") {
		env["PIP_INDEX_URL"], env["PIP_TRUSTED_HOST"] = at("pypi")+"/simple/", Host("pypi")
		env["UV_DEFAULT_INDEX"], env["UV_INDEX_URL"], env["UV_INSECURE_HOST"] = at("pypi")+"/simple/", at("pypi")+"/simple/", Host("pypi")
	}
	if slices.Contains(services, "npm") {
		env["npm_config_registry"], env["YARN_NPM_REGISTRY_SERVER"], env["YARN_UNSAFE_HTTP_WHITELIST"] = at("npm")+"/", at("npm"), Host("npm")
	}
	if slices.Contains(services, "go") {
		env["GOPROXY"], env["GOSUMDB"] = at("go"), "sum.golang.org" // which GOPROXY passes on
	}
	return env
}
