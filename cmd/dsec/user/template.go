package user

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/layer"
)

// Template is the group of verbs for templates.
func Template() *cobra.Command {
	c := &cobra.Command{
		Use:   "template",
		Short: "Bind a name to an image, a workspace and toolkits",
		Long: `A template is a name for an image, a workspace and toolkits as they were when it was made:
later changes of their tags do not change it. Sandboxes are created from it as from an
image. It takes no room of its own.`,
		Example: "  dsec template create swe:1 --image python:3.12 --workspace repo:v1 --toolkit tools:v3\n  dsec run swe:1 -- pytest",
	}
	c.AddCommand(templateCreate(), templateLs(), templateInspect(), templateRm())
	return c
}

func templateCreate() *cobra.Command {
	var image, workspace string
	var toolkits []string
	c := &cobra.Command{
		Use:   "create NAME --image IMAGE",
		Short: "Bind a name to what its parts mean now",
		Long: `The name can be used wherever an image can. A toolkit shadows and deletes what is below it, in the order
given. To replace a part, create the template again: nothing is built, and sandboxes that run keep what they have.`,
		Example:           "  dsec template create swe:1 --image python:3.12 --workspace repo:v1 --toolkit tools:v3",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				t := client.Template{Image: dsec.LayerRef(image), Workspace: dsec.LayerRef(workspace)}
				for _, k := range toolkits {
					t.Toolkits = append(t.Toolkits, dsec.LayerRef(k))
				}
				said := tagging(ctx, c, cl, args[0])
				l, err := cl.CreateTemplate(ctx, args[0], t)
				if err != nil {
					return err
				}
				said(l.Digest)
				return showLayer(c, l)
			})
		},
	}
	c.Flags().StringVar(&image, "image", "", "the base")
	c.Flags().StringVar(&workspace, "workspace", "", "layer above the base")
	c.Flags().StringArrayVar(&toolkits, "toolkit", nil, "layer above those before; may be given again")
	_ = c.MarkFlagRequired("image") // the flag was made above
	return c
}

// partsOf names the parts of a template in a role, each once.
func partsOf(l client.Layer, role layer.Role) string {
	var out []string
	for _, p := range l.Layers {
		name := string(p.Ref)
		if name == "" {
			name = shortDigest(string(p.Digest))
		}
		if p.Role == role && (len(out) == 0 || out[len(out)-1] != name) {
			out = append(out, name)
		}
	}
	return strings.Join(out, ",")
}

func templateLs() *cobra.Command {
	return &cobra.Command{
		Use:               "ls",
		Short:             "List the templates",
		Example:           "  dsec template ls",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				all, err := cl.Templates(ctx)
				if err != nil {
					return err
				}
				return showTemplates(c, all)
			})
		},
	}
}

func showTemplates(c *cobra.Command, all []client.Layer) error {
	if all == nil {
		all = []client.Layer{} // as JSON: []
	}
	return show(c, all, func(w io.Writer) error {
		rows := make([][]string, 0, len(all))
		for _, l := range all {
			rows = append(rows, []string{strings.Join(l.Tags, ","), shortDigest(string(l.Digest)), partsOf(l, layer.RoleBase),
				partsOf(l, layer.RoleWorkspace), partsOf(l, layer.RoleToolkit)})
		}
		return table(w, "NAMES DIGEST IMAGE WORKSPACE TOOLKITS", rows)
	})
}

func templateInspect() *cobra.Command {
	return &cobra.Command{
		Use:               "inspect NAME",
		Short:             "Print what a name is bound to",
		Example:           "  dsec template inspect swe:1",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeImage,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				l, err := template(ctx, cl, args[0])
				if err != nil {
					return err
				}
				return show(c, l, func(w io.Writer) error { return describeLayer(w, l) })
			})
		},
	}
}

// template finds a template by name.
func template(ctx context.Context, cl *client.Client, name string) (client.Layer, error) {
	l, err := cl.InspectLayer(ctx, dsec.LayerRef(name))
	if err == nil && !l.IsTemplate() {
		err = dsec.Errorf(dsec.Invalid, "find template", dsec.Quote(name), "it is no template; dsec layer inspect shows what it is")
	}
	return l, err
}

func templateRm() *cobra.Command {
	return &cobra.Command{
		Use:               "rm NAME...",
		Short:             "Remove templates; their layers stay",
		Example:           "  dsec template rm swe:1",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeLayers,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				for _, name := range args {
					if _, err := template(ctx, cl, name); err != nil {
						return err
					}
					existed, err := cl.RemoveLayer(ctx, dsec.LayerRef(name))
					if err != nil {
						return err
					}
					if err := show(c, removed{name, existed}, printLine(name)); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}

// describeParts prints the layers of a stack.
func (p *page) describeParts(l client.Layer) {
	for i, part := range l.Layers {
		p.line(fmt.Sprintf("layer %d", i+1), strings.Join(strings.Fields(fmt.Sprint(part.Role, " ", part.Digest, " ", part.Ref)), "  "))
	}
}
