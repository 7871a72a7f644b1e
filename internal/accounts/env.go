package accounts

import (
	"errors"
	"maps"
	"slices"
	"strings"
)

var (
	errEmptyName = errors.New("the name is empty")
	errLargeID   = errors.New("ids inside a sandbox go to 65535")
)

// DefaultPath is the PATH of an image that says none.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Environment is the complete environment of a command: the image's, what its
// user and terminal imply, the sandbox's and the command's own, later ones winning.
func Environment(who Identity, pty bool, locale string, image []string, more ...map[string]string) []string {
	env := map[string]string{"PATH": DefaultPath}
	if locale != "" {
		env["LANG"] = locale
	}
	if pty {
		env["TERM"] = "xterm-256color"
	}
	for _, kv := range image {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" && !strings.Contains(kv, "\x00") {
			env[k] = v
		}
	}
	env["HOME"], env["USER"], env["LOGNAME"] = who.Home, who.Name, who.Name // an image says them for one user only
	for _, m := range more {
		maps.Copy(env, m)
	}
	out := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = append(out, k+"="+env[k])
	}
	return out
}
