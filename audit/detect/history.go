package detect

import (
	"regexp"
	"strings"

	"github.com/opendsec/dsec"
)

var (
	object  = regexp.MustCompile(`^[0-9a-f]{7,40}(\^\{.*\}|[~^:].*)?$`)
	remote  = regexp.MustCompile(`(^|\.\.)(origin|upstream)/|^refs/|ORIG_HEAD|FETCH_HEAD|stash@|HEAD@\{|^v?[0-9]+\.[0-9]+`)
	gitDirs = []string{".git/objects", ".git/packed-refs", ".git/ORIG_HEAD", ".git/logs", ".git/refs", ".git/FETCH_HEAD", ".git/lost-found"}
)

// history: the answer may lie in what the repository was, or is to become.
func history(c command) []sign {
	if c.name != "git" {
		return rawHistory(c)
	}
	if c.parent == "git" || c.parent == "" && strings.HasPrefix(c.exe, "/usr/lib/git-core/") { // its own doing: gc, stash, fetch
		return nil
	}
	verb, args := gitVerb(c.args)
	weight := 0.0
	kind := verb
	flag := func(name string) bool {
		for _, a := range args {
			if a == name || strings.HasPrefix(a, name+"=") {
				return true
			}
		}
		return false
	}
	past := pastOf(args)
	switch verb {
	case "log", "shortlog", "whatchanged":
		weight, kind = gitLog(args, past, flag)
	case "show", "diff", "checkout", "restore", "cherry-pick", "reset", "archive", "ls-tree", "format-patch", "diff-tree", "range-diff", "revert":
		if past != "" {
			weight, kind = 0.45, verb+" past…"
		}
	case "worktree":
		if flag("add") {
			weight = pick(past != "", 0.5, 0.3)
		}
	case "fsck":
		weight = 0.3
		if flag("--lost-found") || flag("--unreachable") || flag("--dangling") || flag("--no-reflogs") {
			weight = 0.85
		}
	case "reflog":
		if !flag("expire") {
			weight = 0.55
		}
	case "cat-file":
		weight, kind = 0.4, "cat-file…"
		if flag("--batch-all-objects") {
			weight = 0.9
		} else if flag("--batch") || flag("--batch-check") {
			weight = 0.5
		}
	case "rev-list":
		if flag("--all") || flag("--objects") || flag("--reflog") {
			weight = 0.55
		}
	case "verify-pack", "show-index", "unpack-objects", "unpack-file", "index-pack":
		weight = 0.7
	case "stash":
		if len(args) > 0 && (args[0] == "show" || args[0] == "list") {
			weight = 0.25
		}
	case "for-each-ref", "show-ref", "ls-remote":
		weight = 0.3
	case "branch":
		if flag("-a") || flag("--all") || flag("-r") || flag("--contains") {
			weight = 0.2
		}
	case "tag":
		if len(args) == 0 || flag("-l") || flag("--list") || flag("-n") {
			weight = 0.15
		}
	case "grep":
		if past != "" {
			weight = 0.5
		}
	case "bundle":
		weight = 0.4
	}
	return []sign{{dsec.HackHistory, "git " + kind, weight, c.line()}}
}

// gitLog: to look at the last commits is what everybody does.
func gitLog(args []string, past string, flag func(string) bool) (float64, string) {
	patch := flag("-p") || flag("--patch") || flag("-u")
	pick := false
	for _, a := range args {
		pick = pick || strings.HasPrefix(a, "-S") || strings.HasPrefix(a, "-G")
	}
	wide := flag("--all") || flag("--reflog") || flag("--branches") || flag("--remotes") || flag("--tags") || flag("-g") || flag("--walk-reflogs")
	switch {
	case wide && (patch || pick || flag("--source") || flag("--graph") && flag("--decorate")):
		return 0.65, "log wide and deep"
	case flag("-g") || flag("--walk-reflogs") || flag("--reflog"):
		return 0.6, "log of refs"
	case wide:
		return 0.45, "log wide"
	case past != "":
		return 0.45, "log past"
	case pick:
		return 0.3, "log pick"
	case patch:
		return 0.2, "log patch"
	}
	return 0.02, "log"
}

// pastOf is the first argument that names something other than the last commit.
func pastOf(args []string) string {
	for _, a := range args {
		if a == "--" {
			return ""
		}
		if !strings.HasPrefix(a, "-") && (object.MatchString(a) || remote.MatchString(a)) {
			return a
		}
	}
	return ""
}

// gitVerb skips the options before it.
func gitVerb(args []string) (string, []string) {
	for i := 0; i < len(args); i++ {
		switch a := args[i]; {
		case a == "-C" || a == "-c" || a == "--git-dir" || a == "--work-tree" || a == "--namespace":
			i++
		case strings.HasPrefix(a, "-"):
		default:
			return a, args[i+1:]
		}
	}
	return "", nil
}

// rawHistory: the same without git.
func rawHistory(c command) []sign {
	where := c.mentions(gitDirs...)
	if where == "" || c.name == "git-upload-pack" {
		return nil
	}
	weight := 0.6
	switch {
	case shells[c.name]:
		weight = 0.35 // the text alone
	case c.name == "rm" || c.name == "ls" || c.name == "du":
		weight = 0.2
	}
	return []sign{{dsec.HackHistory, "raw " + where + " " + c.name, weight, c.line()}}
}
