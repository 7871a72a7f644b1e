package user

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
)

// refusal is what profile prints as JSON.
type refusal struct {
	Call    string `json:"call"`
	Errno   string `json:"errno"` // "ignored": it succeeds and does nothing
	Reason  string `json:"reason"`
	Way     string `json:"way"` // what to do instead
	Profile string `json:"profile"`
}

// Profile is the verb that says what a sandbox may not ask of the kernel.
func Profile() *cobra.Command {
	var name string
	var all bool
	c := &cobra.Command{
		Use:   "profile [CALL...]",
		Short: "Show what system calls a profile refuses, why, and the way out",
		Long: `Lists the system calls that programs in a sandbox are refused, with the error they
get, the reason, and what works instead. With CALLs only those: the name of a
call, such as ptrace, or a part of one. --all lists the profiles, what each gives
beyond build, and the least isolation it is given with. Needs no server.`,
		Example: "  dsec profile\n  dsec profile ptrace socket\n  dsec profile --profile debug -o json\n  dsec profile --all",
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			var calls []string
			for _, r := range confine.Refusals(confine.Profile(name), confine.Arch(runtime.GOARCH)) {
				call, _, _ := strings.Cut(r.Call, " ")
				calls = append(calls, call)
			}
			return slices.Compact(calls), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(c *cobra.Command, calls []string) error {
			if all {
				return showProfiles(c)
			}
			p, err := confine.ParseProfile(name)
			if err != nil {
				return err
			}
			return showProfile(c, p, calls)
		},
	}
	c.Flags().StringVar(&name, "profile", string(confine.Build), "profile: build, debug, pwn, desktop, nested")
	c.Flags().BoolVar(&all, "all", false, "list the profiles and what each gives")
	return c
}

// profileInfo is what profile --all prints as JSON.
type profileInfo struct {
	Profile string        `json:"profile"`
	Gives   []abilityInfo `json:"gives"` // beyond build
	Minimum string        `json:"minimum"`
	Tiers   []dsec.Tier   `json:"tiers"` // that have the minimum; a machine may still lack a tier
}

type abilityInfo struct {
	Ability string `json:"ability"`
	Needs   string `json:"needs"`
	Reason  string `json:"reason"`
}

func showProfiles(c *cobra.Command) error {
	var list []profileInfo
	for _, p := range confine.Profiles {
		i := profileInfo{Profile: string(p), Gives: []abilityInfo{}, Minimum: confine.Minimum(p).String()}
		for _, a := range p.Abilities() {
			needs, why := confine.Needs(a)
			i.Gives = append(i.Gives, abilityInfo{string(a), needs.String(), why})
		}
		for _, t := range []dsec.Tier{dsec.TierContainer, dsec.TierMicroVM, dsec.TierFullVM} {
			if confine.Require(p, t) == nil {
				i.Tiers = append(i.Tiers, t)
			}
		}
		list = append(list, i)
	}
	return show(c, list, func(w io.Writer) error {
		rows := make([][]string, len(list))
		for i, p := range list {
			var gives, tiers []string
			for _, a := range p.Gives {
				gives = append(gives, a.Ability)
			}
			for _, t := range p.Tiers {
				tiers = append(tiers, string(t))
			}
			rows[i] = []string{p.Profile, strings.Join(gives, ", "), p.Minimum, strings.Join(tiers, ", ")}
		}
		return table(w, "PROFILE GIVES NEEDS TIERS", rows)
	})
}

func showProfile(c *cobra.Command, p confine.Profile, calls []string) error {
	var list []refusal
	for _, r := range confine.Refusals(p, confine.Arch(runtime.GOARCH)) {
		if wanted(r.Call, calls) {
			list = append(list, refusal{r.Call, r.Errno, r.Reason, r.Way, string(r.Profile)})
		}
	}
	if len(list) == 0 && len(calls) > 0 {
		return dsec.Errorf(dsec.NotFound, "show profile", string(p), "it refuses nothing of the name %s", dsec.Quote(strings.Join(calls, " ")))
	}
	return show(c, list, func(w io.Writer) error {
		if len(calls) == 0 {
			fmt.Fprintf(w, "profile %s; calls that no table knows get ENOSYS, as from an older kernel\n", p)
		}
		rows := make([][]string, len(list))
		for i, r := range list {
			rows[i] = []string{r.Call, r.Errno, r.Reason, r.Way}
		}
		return table(w, "CALL ERROR WHY INSTEAD", rows)
	})
}

func wanted(call string, calls []string) bool {
	if len(calls) == 0 {
		return true
	}
	for _, c := range calls {
		if strings.Contains(call, c) {
			return true
		}
	}
	return false
}
