package detect

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
)

const (
	fewTargets  = 6   // that were refused: nobody's mistake any more
	manyTargets = 12  //
	manyPackets = 200 // refused between two events, which are a second apart or more
)

// refusedPacket: Detail is like "tcp 203.0.113.7:443", or "dns example.org" where
// the refusal of a name is told; all is how many packets were refused up to now, also those
// that were not told. Records and events may both tell of the same.
func (d *Detector) refusedPacket(what string, all int64) (signs []sign) {
	n := all - d.refused
	d.refused = max(d.refused, all)
	protocol, target, ok := strings.Cut(what, " ")
	if !ok {
		return nil
	}
	if protocol == "dns" {
		if from := sources.FindString(target); from != "" {
			weight := 0.35
			if from == "pypi.org" || from == "files.pythonhosted.org" || from == "deb.debian.org" {
				weight = 0.15 // an install that was refused
			}
			return []sign{{dsec.HackSolution, "name " + from, weight, "asked for the address of " + target}}
		}
		return nil
	}
	if len(d.targets) < mostTargets {
		d.targets[what] = true
	}
	switch {
	case len(d.targets) >= manyTargets:
		signs = append(signs, sign{dsec.HackScan, "targets", 0.85, strconv.Itoa(len(d.targets)) + " addresses and ports were refused, the last one " + target})
	case len(d.targets) >= fewTargets:
		signs = append(signs, sign{dsec.HackScan, "targets", 0.6, strconv.Itoa(len(d.targets)) + " addresses and ports were refused, the last one " + target})
	}
	if n >= manyPackets {
		signs = append(signs, sign{dsec.HackScan, "packets", 0.5, strconv.FormatInt(n, 10) + " packets were refused at once"})
	}
	if strings.HasPrefix(target, "169.254.") || strings.HasPrefix(target, "100.100.100.200") {
		signs = append(signs, sign{dsec.HackProbe, "metadata", 0.8, "asked a metadata service at " + target})
	}
	return signs
}

var (
	scanners = set("nmap masscan zmap rustscan unicornscan hping3 arp-scan netdiscover fping naabu")
	sockets  = regexp.MustCompile(`socket|connect_ex|/dev/tcp/|\bnc\b|ncat|curl|ping`)
	loops    = regexp.MustCompile(`\bfor\b|\bwhile\b|\bseq\b|range\(|\{[0-9]+\.\.[0-9]+\}|xargs`)
	nets     = regexp.MustCompile(`(10|127|172|192|169|198|203)\.[0-9]{1,3}\.[0-9$%{]|172\.(1[6-9]|2[0-9]|3[01])\.|\bports?\b|%d|\$(p|i|port|ip|host)\b`)
)

// scans: programs that look for who answers.
func scans(c command) []sign {
	one := func(kind string, weight float64) []sign {
		return []sign{{dsec.HackScan, kind, weight, c.line()}}
	}
	switch {
	case scanners[c.name]:
		return one("scanner", 0.85)
	case c.name == "nc" || c.name == "ncat" || c.name == "netcat":
		zero := false
		for _, a := range c.args {
			zero = zero || strings.HasPrefix(a, "-") && !strings.HasPrefix(a, "--") && strings.Contains(a, "z")
		}
		ranged := false
		for _, a := range c.operands() {
			from, to, ok := strings.Cut(a, "-")
			_, e1 := strconv.Atoi(from)
			_, e2 := strconv.Atoi(to)
			ranged = ranged || ok && e1 == nil && e2 == nil
		}
		return one("nc", pick(zero && ranged, 0.85, pick(zero, 0.3, 0)))
	case c.script != "" && sockets.MatchString(c.script) && loops.MatchString(c.script) && nets.MatchString(c.script):
		return one("loop of connects", pick(strings.Contains(c.script, "connect_ex") || strings.Contains(c.script, "/dev/tcp/"), 0.6, 0.4))
	}
	return nil
}
