package client

import (
	"context"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// Screenshot is what the screen of a sandbox shows now, all of it or a part.
func (c *Client) Screenshot(ctx context.Context, id dsec.SandboxID, region dsec.Region) (dsec.Picture, error) {
	var resp *dsecv1.ScreenshotResponse
	err := c.retry(ctx, "take screenshot", func() (err error) {
		resp, err = c.screens.Screenshot(ctx, &dsecv1.ScreenshotRequest{Id: string(id), Region: wire.Region(region)})
		return err
	})
	return wire.PictureFrom(resp), err
}

// Act does one action at the screen of a sandbox after the other, as a person would.
func (c *Client) Act(ctx context.Context, id dsec.SandboxID, actions ...dsec.ScreenAction) error {
	req := &dsecv1.ActRequest{Id: string(id), Actions: wire.Actions(actions), CallId: newKey()}
	return c.retry(ctx, "act on screen", func() error {
		_, err := c.screens.Act(ctx, req)
		return err
	})
}

// Console is the end of what a machine wrote to its serial port.
func (c *Client) Console(ctx context.Context, id dsec.SandboxID) ([]byte, error) {
	var resp *dsecv1.ConsoleResponse
	err := c.retry(ctx, "read console", func() (err error) {
		resp, err = c.screens.Console(ctx, &dsecv1.ConsoleRequest{Id: string(id)})
		return err
	})
	return resp.GetText(), err
}

// Power presses a button of a machine.
func (c *Client) Power(ctx context.Context, id dsec.SandboxID, p dsec.Power) error {
	req := &dsecv1.PowerRequest{Id: string(id), Power: string(p), CallId: newKey()}
	return c.retry(ctx, "switch power", func() error {
		_, err := c.screens.Power(ctx, req)
		return err
	})
}

// Mark keeps what a running sandbox is at this moment under a name.
func (c *Client) Mark(ctx context.Context, id dsec.SandboxID, name string) error {
	req := &dsecv1.MarkRequest{Id: string(id), Name: name, CallId: newKey()}
	return c.retry(ctx, "mark sandbox", func() error {
		_, err := c.screens.Mark(ctx, req)
		return err
	})
}

// Revert makes of a sandbox what it was at a mark, and has it run.
func (c *Client) Revert(ctx context.Context, id dsec.SandboxID, name string) error {
	req := &dsecv1.RevertRequest{Id: string(id), Name: name, CallId: newKey()}
	return c.retry(ctx, "revert sandbox", func() error {
		_, err := c.screens.Revert(ctx, req)
		return err
	})
}

// Marks lists those of a sandbox.
func (c *Client) Marks(ctx context.Context, id dsec.SandboxID) ([]string, error) {
	var resp *dsecv1.MarksResponse
	err := c.retry(ctx, "list marks", func() (err error) {
		resp, err = c.screens.Marks(ctx, &dsecv1.MarksRequest{Id: string(id)})
		return err
	})
	return resp.GetNames(), err
}
