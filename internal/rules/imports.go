package rules

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// contracts in their order: each may import those before it.
var contracts = []string{"blob", "image", "layer", "rootfs", "confine", "process", "files", "guest", "qos", "netpolicy", "iam",
	"trajectory", "audit", "runtime", "snapshot"}

// engines may import contracts; they meet only in api and over NATS.
var engines = []string{"gateway", "cluster", "node"}

// mechanismFree libraries that an implementation may import besides contracts.
var mechanismFree = []string{"process", "files", "confine", "confine/apparmor", "image/erofs"}

// agentMay be imported by the agent of a guest, which has no use for more.
var agentMay = []string{"guest", "process", "files", "confine"}

// Imports checks the direction of every import of our own packages in files
// that are not tests.
func Imports(files []File) (broken []string) {
	for _, f := range files {
		if f.Test {
			continue
		}
		for _, im := range f.AST.Imports {
			path, err := strconv.Unquote(im.Path.Value)
			if err != nil {
				continue
			}
			if why := importRule(f.Dir, path); why != "" {
				broken = append(broken, fmt.Sprintf("%s: %s may not import %s: %s", f.pos(im), f.Dir, path, why))
			}
		}
	}
	return broken
}

func importRule(from, path string) (why string) {
	if !strings.HasPrefix(path, Module) {
		if from == "." && strings.Contains(strings.SplitN(path, "/", 2)[0], ".") {
			return "the vocabulary uses the standard library only"
		}
		return ""
	}
	to := strings.TrimPrefix(strings.TrimPrefix(path, Module), "/")
	if to == "" {
		to = "."
	}
	top := strings.SplitN(from, "/", 2)[0]
	toTop := strings.SplitN(to, "/", 2)[0]
	switch {
	case from == "guest/agent" && !slices.Contains(agentMay, to) && toTop != "internal" && to != ".":
		return "what runs inside a guest is small: only " + strings.Join(agentMay, ", ")
	case top == "cmd" || top == "e2e" || top == "bench":
		return ""
	case to == ".":
		return ""
	case from == ".":
		return "the vocabulary uses the standard library only"
	case toTop == "internal":
		if top == "scheduler" {
			return "placement is pure: root only"
		}
		return ""
	case top == "internal":
		return internalRule(to)
	case top == "scheduler":
		return "placement is pure: root only"
	case to == "api" || toTop == "api":
		if slices.Contains([]string{"gateway", "cluster", "node", "client", "api"}, top) {
			return ""
		}
		return "the wire is translated at the edge: gateway, cluster, node, client"
	case top == toTop:
		return "" // a contract and its implementations, an engine and its parts; siblings are checked below
	}
	return contractRule(from, top, to, toTop)
}

// internalRule: machinery has no domain words; the hold speaks the contract of
// the commands it runs.
func internalRule(to string) string {
	if slices.Contains(mechanismFree, to) {
		return ""
	}
	return "machinery may import only " + strings.Join(mechanismFree, ", ")
}

func contractRule(from, top, to, toTop string) string {
	fromIdx, toIdx := slices.Index(contracts, top), slices.Index(contracts, toTop)
	isChild := strings.Contains(from, "/")
	switch {
	case slices.Contains(engines, toTop):
		if top == "gateway" && toTop == "cluster" {
			return ""
		}
		return "engines meet only in api and over NATS"
	case toTop == "scheduler":
		if top == "cluster" || top == "gateway" {
			return ""
		}
		return "only cluster asks the scheduler"
	case isChild && strings.HasSuffix(from, "test") && toIdx >= 0 && toIdx <= fromIdx:
		return "" // a conformance suite is a test, and needs what is real below it
	case strings.Contains(to, "/") && !slices.Contains(mechanismFree, to) && toIdx >= 0:
		return "only cmd and tests import implementations"
	case fromIdx >= 0 && toIdx >= 0 && !isChild && toIdx > fromIdx:
		return "contracts import earlier contracts only"
	case slices.Contains(engines, top), top == "client", from == "api/wire", fromIdx >= 0:
		return "" // api/wire translates between the messages and the contracts
	}
	return "not a direction the map knows"
}
