package detect

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

const (
	flood     = 500  // starts of one program in a second
	bigFlood  = 1000 // starts of a command that were told together
	hugeFlood = 5000
)

var (
	bombs = regexp.MustCompile(`:\(\)\s*\{|os\.fork\(\)|\bfork\b.*(while|loop)|\bwhile\b.*\bfork\b|(while|for).*(subprocess|Popen)`)
	wreck = regexp.MustCompile(`rm\s+-[a-zA-Z]*[rR][a-zA-Z]*\s+(--no-preserve-root\s+)?/(\*|\s|$|bin|usr|lib|etc)|sysrq-trigger|kill\s+(-9|-KILL)\s+(-1|1)\b|dd\s.*of=/dev/(sd|vd|nvme|mem|kmem)|\b(yes|cat /dev/zero|cat /dev/urandom)\s*>`)
	eats  = regexp.MustCompile(`bytearray\(|b'\w'\s*\*\s*\(?\d+|\* ?10\*\*\d|<<\s*[23]\d`)
)

// damage: programs that are to break the sandbox or its node.
func damage(c command) []sign {
	one := func(kind string, weight float64) []sign {
		return []sign{{dsec.HackNode, kind, weight, c.line()}}
	}
	switch c.name {
	case "reboot", "halt", "poweroff", "shutdown", "telinit", "init":
		return one("reboot", 0.7)
	case "stress", "stress-ng":
		return one("stress", 0.6)
	case "kill", "pkill", "killall", "killall5":
		if c.name == "killall5" || c.name == "kill" && (c.has("1", "-1") && !c.has("-l")) && killsAll(c) {
			return one("kill all", 0.75)
		}
	case "rm", "shred", "mkfs", "wipefs":
		for _, p := range c.operands() {
			switch strings.TrimSuffix(strings.TrimSuffix(p, "*"), "/") {
			case "", "/bin", "/usr", "/usr/bin", "/lib", "/lib64", "/usr/lib", "/etc", "/sbin", "/var":
				if strings.HasPrefix(p, "/") {
					return one("removes the system", 0.8)
				}
			}
		}
	case "dd", "fallocate", "truncate", "head":
		if hugeSize(c) {
			return one("huge file", 0.45)
		}
	case "yes":
		return one("yes", 0.02)
	case "ulimit", "prlimit":
		return one("limits", 0.02)
	}
	if c.script == "" {
		return nil
	}
	if bombs.MatchString(c.script) {
		return one("bomb in script", 0.5)
	}
	if wreck.MatchString(c.script) {
		return one("damage in script", 0.45)
	}
	if eats.MatchString(c.script) { // memory; most of it is honest
		return one("memory in script", 0.15)
	}
	return nil
}

// killsAll: the target is everybody, or the first process.
func killsAll(c command) bool {
	last := ""
	if len(c.args) > 0 {
		last = c.args[len(c.args)-1]
	}
	return last == "-1" && len(c.args) > 1 || last == "1"
}

var size = regexp.MustCompile(`(?i)\b([0-9]+)(g|gb|gib|t|tb|tib)\b`)

func hugeSize(c command) bool {
	m := size.FindStringSubmatch(strings.Join(c.args, " "))
	if m == nil {
		return false
	}
	n, _ := strconv.Atoi(m[1]) // too large: 0 is not huge, and nobody has it
	return n >= 4 || strings.HasPrefix(strings.ToLower(m[2]), "t")
}

// flood: the same program again and again, so fast that records stand for many.
func (d *Detector) flood(r dsec.AuditRecord) []sign {
	if r.Count < 2 || d.starts[r.Exec] == 0 && len(d.starts) >= mostExecs {
		return nil
	}
	d.starts[r.Exec] += r.Count
	n := d.starts[r.Exec]
	return []sign{{dsec.HackNode, "starts", pick(n >= hugeFlood, 0.7, pick(n >= bigFlood, 0.55, 0)), strconv.FormatInt(n, 10) + " starts of the same programs, the last one " + commandOf(r).line()}}
}

// lostRecords: only a flood of starts loses many at once.
func lostRecords(r dsec.AuditRecord) []sign {
	if r.Count < flood || !strings.Contains(r.Detail, "programs were started") {
		return nil
	}
	return []sign{{dsec.HackNode, "flood of starts", pick(r.Count > 10*flood, 0.7, 0.5), strconv.FormatInt(r.Count, 10) + " starts were too fast to be told"}}
}

// damageEvent: the platform was hurt, or memory ran out.
func damageEvent(e dsec.Event) []sign {
	if e.Type == dsec.EventOOM {
		return []sign{{dsec.HackNode, "oom", 0.2, "a process was killed by the memory limit"}}
	}
	if e.Fields["by"] != string(dsec.InducedBySelf) {
		return nil
	}
	weight := 0.55
	switch e.Fields["scope"] {
	case "node":
		weight = 0.9
	case "service":
		weight = 0.85
	}
	return []sign{{dsec.HackNode, "repercussion", weight, "damage: " + e.Detail}}
}

const manyKills = 4 // by the memory limit: a build is killed once or twice

// full: as many processes as there may be, or out of memory again and again.
func full(u dsec.Usage, pids int64) (signs []sign) {
	if pids > 0 && u.PidsPeak >= pids {
		signs = append(signs, sign{dsec.HackNode, "pids", 0.55, strconv.FormatInt(u.PidsPeak, 10) + " processes at a time, which is the limit"})
	}
	if u.OOMKills >= manyKills {
		signs = append(signs, sign{dsec.HackNode, "kills", 0.45, strconv.FormatInt(u.OOMKills, 10) + " processes were killed by the memory limit"})
	}
	return signs
}

// endedSo: some ends are nobody's but the sandbox's. One that would be masked, and that
// it has induced itself, is what a masked failure is worth an attack for.
func endedSo(r dsec.Result) []sign {
	weight := 0.0
	switch {
	case r.Cause.Infra() && r.InducedBy == dsec.InducedBySelf:
		weight = 0.9
	case r.Cause == dsec.CauseAgentDamage:
		weight = 0.6
	case r.Cause == dsec.CausePidsLimit:
		weight = 0.6
	case r.Cause == dsec.CauseDiskFull:
		weight = 0.35
	case r.Cause == dsec.CauseOOM:
		weight = 0.3
	}
	return []sign{{dsec.HackNode, "end", weight, "it ended so: " + string(r.Cause) + ", induced by " + string(r.InducedBy)}}
}
