package user

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Audit is the verb that prints the evidence of what a sandbox did.
func Audit() *cobra.Command {
	var f dsec.AuditFilter
	var kinds []string
	c := &cobra.Command{
		Use:   "audit SANDBOX",
		Short: "Print the evidence of what a sandbox did",
		Long: `Programs that were started, writes to watched paths, what was refused, changes of
policy, as seen from outside of the sandbox, which can neither read nor change it. It works
also after the sandbox was deleted, as long as its record is kept.

Who did it, which program and when are the kernel's word; the arguments are the program's
own. "~/bin/true" is what a program was asked for by that ended before its file could be named,
which proves no file. A line "lost" says what is missing.`,
		Example:           "  dsec audit work\n  dsec audit work -f --kind write --kind network\n  dsec audit work --since 120 -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			for _, k := range kinds {
				if !slices.Contains(auditKinds, dsec.AuditKind(k)) {
					return dsec.Errorf(dsec.Invalid, "read flag", "--kind", "%s is none of %s", dsec.Quote(k), kindNames())
				}
				f.Kinds = append(f.Kinds, dsec.AuditKind(k))
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				err = cl.Audit(ctx, id, f, func(r dsec.AuditRecord) error { return printAudit(c, r) })
				if f.Follow && ctx.Err() != nil {
					return nil // ended as it should: by its user
				}
				return err
			})
		},
	}
	c.Flags().BoolVarP(&f.Follow, "follow", "f", false, "go on until the sandbox is deleted")
	c.Flags().Uint64Var(&f.Since, "since", 0, "only what comes after the record of that number")
	c.Flags().StringArrayVar(&kinds, "kind", nil, "only of this kind: "+kindNames()+" (repeat)")
	return c
}

var auditKinds = []dsec.AuditKind{dsec.AuditProcess, dsec.AuditWrite, dsec.AuditSyscall, dsec.AuditNetwork, dsec.AuditPhase, dsec.AuditPolicy,
	dsec.AuditNote, dsec.AuditLost}

func kindNames() string {
	var names []string
	for _, k := range auditKinds {
		names = append(names, string(k))
	}
	return strings.Join(names, ", ")
}

func printAudit(c *cobra.Command, r dsec.AuditRecord) error {
	return show(c, r, func(w io.Writer) error {
		who := "-"
		if r.UID != dsec.NobodyID {
			who = fmt.Sprintf("%d:%d", r.UID, r.GID)
		}
		pid := "-"
		if r.PID != 0 {
			pid = strconv.Itoa(r.PID)
		}
		line := fmt.Sprintf("%6d  %s  %-7s  %-9s  %7s  %s", r.Seq, r.Time.Local().Format("15:04:05.000"), r.Kind, who, pid, auditText(r))
		_, err := fmt.Fprintln(w, safe(line))
		return err
	})
}

// auditText is what a record says besides who and when.
func auditText(r dsec.AuditRecord) string {
	var parts []string
	if r.Path != "" {
		parts = append(parts, r.Path)
	}
	if r.Detail != "" {
		parts = append(parts, r.Detail)
	}
	if r.Exe != "" {
		by := r.Exe
		if r.Kind != dsec.AuditProcess {
			by = "by " + by
		}
		if len(r.Args) > 0 {
			by += "  [" + strings.Join(r.Args, " ") + "]"
		}
		parts = append(parts, by)
	}
	if r.Exec != "" {
		parts = append(parts, "exec="+r.Exec)
	}
	if r.Phase != "" {
		parts = append(parts, "phase="+r.Phase)
	}
	if r.Count > 0 {
		parts = append(parts, "×"+strconv.FormatInt(r.Count, 10))
	}
	return strings.Join(parts, "  ")
}
