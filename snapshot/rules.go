package snapshot

import (
	"path"
	"strings"
)

// rule is what goes of a path, and why. "" is that it stays.
type rule struct {
	name string // this name of it, and all in it
	// all: it under every name, and every copy. Where only the name goes, what is in
	// it may live on: package managers link from their caches into what they install.
	all     string
	ifToken bool // all goes only if there is a credential in it
}

// and is both rules: what one of them takes goes.
func (r rule) and(o rule) rule {
	if r.name == "" {
		r.name = o.name
	}
	if r.all == "" || r.ifToken && o.all != "" && !o.ifToken {
		r.all, r.ifToken = o.all, o.ifToken
	}
	return r
}

// inherited is the rule for what is in a directory. Whether a credential is in it
// is asked of files only.
func (r rule) inherited() *rule {
	if r.ifToken {
		r.all, r.ifToken = "", false
	}
	return &r
}

// Names of files, in any directory, that keep what somebody typed.
var histories = map[string]bool{".bash_history": true, ".sh_history": true, ".ash_history": true, ".zsh_history": true, ".zhistory": true,
	".ksh_history": true, ".history": true, "fish_history": true, ".python_history": true, ".ipython_history": true, ".node_repl_history": true,
	".psql_history": true, ".mysql_history": true, ".sqlite_history": true, ".rediscli_history": true, ".dbshell": true, ".irb_history": true,
	".pry_history": true, ".lesshst": true, ".viminfo": true, ".wget-hsts": true, ".gdb_history": true, ".octave_hist": true, ".julia_history": true}

// ends are the last components of a path, each a pattern.
type ends []string

func endsOf(list string) (all []ends) {
	for _, f := range strings.Fields(list) {
		all = append(all, strings.Split(f, "/"))
	}
	return all
}

// match compares from the end of the path.
func (e ends) match(name string) bool {
	for i := len(e) - 1; i >= 0; i-- {
		part := name
		if at := strings.LastIndexByte(name, '/'); at >= 0 {
			part, name = name[at+1:], name[:at]
		} else if name = ""; i > 0 && part == "" {
			return false
		}
		if ok, _ := path.Match(e[i], part); !ok {
			return false
		}
	}
	return true
}

func matchEnds(all []ends, name string) bool {
	for _, e := range all {
		if e.match(name) {
			return true
		}
	}
	return false
}

// Where credentials are kept, in any home. A directory goes with all in it.
var credentials = endsOf(`.ssh/id_* .ssh/identity .ssh/*.pem .ssh/*.key .ssh/*_rsa .ssh/*_ed25519 .ssh/*_ecdsa .ssh/*_dsa etc/ssh/ssh_host_*_key
	.aws/credentials .aws/sso/cache .aws/cli/cache .config/gcloud .azure/*token* .azure/accessTokens.json .azure/msal_* .azure/service_principal*
	.docker/config.json .dockercfg .config/containers/auth.json containers/auth.json .kube/config .kube/cache .config/helm/registry
	.netrc _netrc .pypirc .git-credentials .config/git/credentials .config/gh/hosts.yml .config/glab-cli .config/hub .cargo/credentials
	.cargo/credentials.toml .gem/credentials .local/share/gem/credentials .terraform.d/credentials.tfrc.json .terraformrc .pgpass .my.cnf .mylogin.cnf .vault-token
	.huggingface/token .cache/huggingface/token .cache/huggingface/stored_tokens huggingface/token .kaggle/kaggle.json .config/rclone/rclone.conf .s3cfg .boto .databrickscfg
	.snowsql/config .config/doctl .config/op .config/flyctl .fly .netlify .config/netlify .heroku .config/heroku .password-store
	.gnupg/private-keys-v1.d .gnupg/secring.gpg .config/sops/age .composer/auth.json .config/composer/auth.json .m2/settings-security.xml
	.yarnrc.yml.auth .mc/config.json .config/wandb .wandb_api_key .comet.config .anthropic .openai .config/openai`)

// Files that hold a credential now and then: they go if they do.
var perhaps = endsOf(`.npmrc etc/npmrc .yarnrc .yarnrc.yml .pip/pip.conf pip/pip.conf etc/pip.conf .config/uv/uv.toml .poetry/auth.toml pypoetry/auth.toml
	.git/config .gitconfig .config/git/config .env .env.* *.env .m2/settings.xml .gradle/gradle.properties .aws/config .bundle/config
	.condarc .curlrc .wgetrc .ssh/config terraform.tfvars .config/pip/pip.conf .nuget/NuGet/NuGet.Config .sbt/.credentials`)

// What can be fetched or made again. What is in these directories goes, they stay.
var cached = endsOf(`.cache/* var/cache/*/* var/lib/apt/lists/* .npm/_cacache .npm/_npx .yarn/cache .pnpm-store .cargo/registry/cache .cargo/registry/src
	go/pkg/mod/cache .gradle/caches .m2/repository .nuget/packages __pycache__ .pytest_cache .mypy_cache .ruff_cache .tox .hypothesis .ipynb_checkpoints
	.parcel-cache .next/cache .sass-cache .ccache .thumbnails`)

// What package managers write about themselves.
var packageLogs = endsOf(`var/log/apt/* var/log/dpkg.log* var/log/alternatives.log* var/log/unattended-upgrades/* var/log/yum.log* var/log/dnf*.log* var/log/hawkey.log*
	var/log/zypper.log* var/log/pacman.log var/log/apk.log var/log/anaconda var/log/bootstrap.log var/lib/dpkg/*-old var/cache/debconf/*-old
	npm-debug.log* yarn-error.log yarn-debug.log* .npm/_logs .pip/pip.log .conda/environments.txt`)

// rule says what goes of a path by its name: all rules count, the first that
// takes it tells why.
func (s *scrubber) rule(name string, dir bool) (r rule) {
	whole := func(why string) { r = r.and(rule{name: why, all: why}) }
	for i, g := range s.globs {
		if g.Match(name) {
			whole("matches " + s.rules.Patterns[i])
			break
		}
	}
	if s.rules.Histories && histories[path.Base(name)] {
		whole("history")
	}
	if s.rules.Credentials {
		public := !dir && strings.HasSuffix(name, ".pub")
		if matchEnds(credentials, name) && !public {
			whole("credentials")
		}
		if matchEnds(perhaps, name) {
			r = r.and(rule{all: "a credential in it", ifToken: true})
		}
	}
	if s.rules.Caches && matchEnds(cached, name) {
		r = r.and(rule{name: "cache"})
	}
	if s.rules.Logs && matchEnds(packageLogs, name) {
		r = r.and(rule{name: "log of a package manager"})
	}
	return r
}

// largeFile is what is worth a look where nothing large is expected.
const largeFile = 64 << 20

var usualPlaces = []string{"usr/", "bin/", "sbin/", "lib/", "lib32/", "lib64/", "opt/", "var/lib/", "var/cache/", "boot/", "nix/", "snap/"}

// usualPlace tells where distributions and package managers put things.
func usualPlace(name string) bool {
	for _, p := range usualPlaces {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	for _, part := range []string{"/site-packages/", "/dist-packages/", "/node_modules/", "/.git/", "/.venv/bin/", "/venv/bin/", "/.cargo/", "/go/pkg/"} {
		if strings.Contains("/"+name, part) {
			return true
		}
	}
	return false
}
