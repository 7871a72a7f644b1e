// Package tier is what the implementations of a runtime share: which sandboxes there are,
// whose turn it is to change one and in which phase it is; the ends that are to be told;
// commands and file services whose errors say when it is the sandbox that is gone.
// Everything is safe for concurrent use.
package tier

import (
	"github.com/opendsec/dsec"
)

// Wrap names the call and the sandbox in the error of a step; nil stays nil.
func Wrap(op string, id dsec.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	return dsec.E(dsec.ClassOf(err), op, string(id), err)
}
