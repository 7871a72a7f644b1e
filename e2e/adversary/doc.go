// Package adversary holds what hostile code tries: one program per technique, run
// as root and as an ordinary user inside sandboxes of a real machine. Vectors says
// of each what stops it; the tests want that it was stopped by that, that the
// attempt was recorded, that the same program succeeds where nothing stops it, and
// that machine and neighbours are as before. docs/security-vectors.md is made from
// the table by `go test ./e2e/adversary -run Document -update`.
package adversary
