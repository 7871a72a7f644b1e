package client

import (
	"context"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// Call makes a stateless call. What the call itself does is in the result, whatever it
// is; an error says that the platform could not, or that the call cannot be made as it
// is. The same CallID again ("" makes a new one) waits for the same call, or gives its
// result for ten minutes.
func (c *Client) Call(ctx context.Context, call dsec.Call) (dsec.CallResult, error) {
	if err := call.Validate(); err != nil {
		return dsec.CallResult{}, err
	}
	if call.CallID == "" {
		call.CallID = newKey()
	}
	req := wire.Call(call)
	var resp *dsecv1.CallResponse
	err := c.retry(ctx, "call", func() (err error) {
		resp, err = c.functions.Call(ctx, req)
		return err
	})
	return wire.CallResultFrom(resp), err
}
