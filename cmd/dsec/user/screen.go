package user

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Screen is the group of verbs for the screen of a sandbox that is a machine.
func Screen() *cobra.Command {
	c := &cobra.Command{
		Use:   "screen",
		Short: "See the screen of a machine, and act at it",
		Long: `Sandboxes of the tier fullvm have a screen, a keyboard, a pointer, a serial port and a power
switch, whatever system they run. Positions are pixels, from the left and the top.`,
		Example: "  dsec screen shot work screen.png\n  dsec screen click work 200 90\n  dsec screen type work 'hello'\n  dsec screen keys work ctrl alt t",
	}
	c.AddCommand(screenShot(), screenClick(), screenMove(), screenDrag(), screenScroll(), screenType(), screenKeys(), screenConsole(), screenPower())
	return c
}

// at is a verb about a sandbox whose other arguments f gets.
func at(use, short, example string, args cobra.PositionalArgs, f func(ctx context.Context, c *cobra.Command, on onScreen) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Example: example, Args: args, ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				return f(ctx, c, onScreen{cl, id, args[1:]})
			})
		},
	}
}

type onScreen struct {
	*client.Client
	id   dsec.SandboxID
	args []string
}

// numbers are arguments that have to be some.
func (o onScreen) numbers() ([]int, error) {
	var all []int
	for _, a := range o.args {
		n, err := strconv.Atoi(a)
		if err != nil {
			return nil, dsec.Errorf(dsec.Invalid, "read number", dsec.Quote(a), "want a whole one")
		}
		all = append(all, n)
	}
	return all, nil
}

func screenShot() *cobra.Command {
	var region string
	c := at("shot SANDBOX [FILE.png]", "Take a picture of the screen", "  dsec screen shot work screen.png\n  dsec screen shot work --region 40,40,320,100 >button.png", cobra.RangeArgs(1, 2),
		func(ctx context.Context, c *cobra.Command, on onScreen) error {
			var r dsec.Region
			if region != "" {
				if n, err := fmt.Sscanf(region, "%d,%d,%d,%d", &r.X, &r.Y, &r.Width, &r.Height); n != 4 {
					return dsec.Errorf(dsec.Invalid, "read region", dsec.Quote(region), "want X,Y,WIDTH,HEIGHT: %w", err)
				}
			}
			p, err := on.Screenshot(ctx, on.id, r)
			if err != nil {
				return err
			}
			if len(on.args) == 0 {
				_, err := c.OutOrStdout().Write(p.PNG)
				return err
			}
			if err := os.WriteFile(on.args[0], p.PNG, 0o644); err != nil {
				return hostError("write", on.args[0], err)
			}
			return nil
		})
	c.Flags().StringVar(&region, "region", "", "a part of it: X,Y,WIDTH,HEIGHT")
	return c
}

func screenClick() *cobra.Command {
	var button string
	var count int
	c := at("click SANDBOX X Y", "Click somewhere", "  dsec screen click work 200 90\n  dsec screen click work 200 90 --button right", cobra.ExactArgs(3),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			n, err := on.numbers()
			if err != nil {
				return err
			}
			return on.Act(ctx, on.id, dsec.ScreenAction{Kind: dsec.ScreenClick, X: n[0], Y: n[1], Button: button, Count: count})
		})
	c.Flags().StringVar(&button, "button", "left", "left, middle or right")
	c.Flags().IntVar(&count, "count", 1, "how many times")
	return c
}

func screenMove() *cobra.Command {
	return at("move SANDBOX X Y", "Move the pointer", "  dsec screen move work 200 90", cobra.ExactArgs(3),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			n, err := on.numbers()
			if err != nil {
				return err
			}
			return on.Act(ctx, on.id, dsec.ScreenAction{Kind: dsec.ScreenMove, X: n[0], Y: n[1]})
		})
}

func screenDrag() *cobra.Command {
	return at("drag SANDBOX X Y TO_X TO_Y", "Move the pointer with the button held", "  dsec screen drag work 100 400 500 500", cobra.ExactArgs(5),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			n, err := on.numbers()
			if err != nil {
				return err
			}
			return on.Act(ctx, on.id, dsec.ScreenAction{Kind: dsec.ScreenDrag, X: n[0], Y: n[1], ToX: n[2], ToY: n[3]})
		})
}

func screenScroll() *cobra.Command {
	var right int
	c := at("scroll SANDBOX X Y STEPS", "Turn the wheel; negative steps go up", "  dsec screen scroll work 500 500 3\n  dsec screen scroll work 500 500 -- -3", cobra.ExactArgs(4),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			n, err := on.numbers()
			if err != nil {
				return err
			}
			return on.Act(ctx, on.id, dsec.ScreenAction{Kind: dsec.ScreenScroll, X: n[0], Y: n[1], DY: n[2], DX: right})
		})
	c.Flags().IntVar(&right, "right", 0, "steps to the right")
	return c
}

func screenType() *cobra.Command {
	var compose bool
	c := at("type SANDBOX TEXT...", "Type on a US keyboard", "  dsec screen type work 'hello, world'", cobra.MinimumNArgs(2),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			return on.Act(ctx, on.id, dsec.ScreenAction{Kind: dsec.ScreenText, Text: strings.Join(on.args, " "), Compose: compose})
		})
	c.Flags().BoolVar(&compose, "compose", false, "what that has no key for as Ctrl+Shift+U, its number, Space")
	return c
}

func screenKeys() *cobra.Command {
	return at("keys SANDBOX KEY...", "Press keys together", "  dsec screen keys work ctrl alt t\n  dsec screen keys work enter", cobra.MinimumNArgs(2),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			return on.Act(ctx, on.id, dsec.ScreenAction{Kind: dsec.ScreenKeys, Keys: on.args})
		})
}

func screenConsole() *cobra.Command {
	return at("console SANDBOX", "Print the end of what came from its serial port", "  dsec screen console work", cobra.ExactArgs(1),
		func(ctx context.Context, c *cobra.Command, on onScreen) error {
			text, err := on.Console(ctx, on.id)
			if err != nil {
				return err
			}
			// It is a guest's: nothing in it may steer the terminal.
			_, err = io.WriteString(c.OutOrStdout(), strings.Map(func(r rune) rune {
				if r < ' ' && r != '\n' && r != '\t' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0xfffd {
					return -1
				}
				return r
			}, string(text)))
			return err
		})
}

func screenPower() *cobra.Command {
	return at("power SANDBOX button|reset", "Press the power or the reset button", "  dsec screen power work button", cobra.ExactArgs(2),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			return on.Power(ctx, on.id, dsec.Power(on.args[0]))
		})
}

// Mark is the verb that keeps what a sandbox is at this moment.
func Mark() *cobra.Command {
	c := at("mark SANDBOX [NAME]", "Keep what a running machine is, to go back to", "  dsec mark work before-login\n  dsec mark work", cobra.RangeArgs(1, 2),
		func(ctx context.Context, c *cobra.Command, on onScreen) error {
			if len(on.args) == 1 {
				return on.Mark(ctx, on.id, on.args[0])
			}
			all, err := on.Marks(ctx, on.id)
			if err != nil {
				return err
			}
			return show(c, all, func(w io.Writer) error {
				for _, name := range all {
					if _, err := fmt.Fprintln(w, name); err != nil {
						return err
					}
				}
				return nil
			})
		})
	c.Long = `Keeps the memory, the programs and the disk of a running sandbox of the tier fullvm under a name; it
stands still for that moment. Without a name it lists what was kept. Marks count for the disk
limit, and go with the sandbox.`
	return c
}

// Revert is the verb that goes back to a mark.
func Revert() *cobra.Command {
	return at("revert SANDBOX NAME", "Go back to a mark", "  dsec revert work before-login", cobra.ExactArgs(2),
		func(ctx context.Context, _ *cobra.Command, on onScreen) error {
			return on.Revert(ctx, on.id, on.args[0])
		})
}

func imageAddDisk() *cobra.Command {
	var firmware, bus, video string
	var agent bool
	c := &cobra.Command{
		Use:   "add-disk NAME FILE",
		Short: "Make an image of a disk, for the tier fullvm",
		Long: `FILE is a qcow2 image that stands for itself, or a raw disk. It is read and checked here, and
kept as what it says, without its head: no machine ever opens the file. What stands on another
file, is encrypted or has snapshots inside is refused; qemu-img convert makes it plain.`,
		Example:           "  dsec image add-disk debian:disk disk.qcow2 --agent\n  dsec image add-disk win11 win.raw --firmware uefi --bus sata",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				l, err := addDisk(ctx, c, cl, args, func(m *diskManifest) { m.Firmware, m.Bus, m.Video, m.Agent = firmware, bus, video, agent })
				if err != nil {
					return err
				}
				return showLayer(c, l)
			})
		},
	}
	c.Flags().StringVar(&firmware, "firmware", "bios", "that boots it: bios, uefi")
	c.Flags().StringVar(&bus, "bus", "virtio", "of the disk: virtio, sata")
	c.Flags().StringVar(&video, "video", "std", "the screen: std, virtio, none")
	c.Flags().BoolVar(&agent, "agent", false, "the guest agent is a service in it: commands and files work")
	return c
}
