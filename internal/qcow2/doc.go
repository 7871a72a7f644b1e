// Package qcow2 reads disk images that nobody vouches for, and makes the empty ones that machines write to.
//
// The format is QEMU's (its docs/interop/qcow2.txt), versions 2 and 3. What would lead a reader out of the file is refused:
// a backing file, a data file beside it, encryption; so is what is of no use here or not known: internal
// snapshots, extended entries, other features, an image marked corrupt. Offsets are checked against the
// file before they are followed, and what is allocated against what the file can hold: an image that says it has
// more than that is Corrupt. QEMU itself never opens what came from outside.
package qcow2
