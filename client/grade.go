package client

import (
	"context"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// Grade runs a grader on what was done in a sandbox, in a fresh one unless s says
// otherwise. A result says what was found, and only with cause completed has a
// reward; an error says that no grading took place. The same callID again ("" makes
// a new one) waits for the same grading, or gives its result for 24 h.
func (c *Client) Grade(ctx context.Context, id dsec.SandboxID, s dsec.GradeSpec, callID string) (dsec.GradeResult, error) {
	if err := s.Validate(); err != nil {
		return dsec.GradeResult{}, err
	}
	if callID == "" {
		callID = newKey()
	}
	req := wire.GradeSpec(id, s, callID)
	var resp *dsecv1.GradeResponse
	err := c.retry(ctx, "grade sandbox", func() (err error) {
		resp, err = c.sandboxes.Grade(ctx, req)
		return err
	})
	return wire.GradeFrom(resp), err
}
