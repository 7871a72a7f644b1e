// Package tree copies, removes and searches trees of files by descriptors, as root
// of the machine and with nothing left out: owners, modes, times, extended
// attributes, links of both kinds, sparse files, FIFOs, sockets and devices.
//
// A place is an open directory and one name in it. No function follows a symbolic
// link, or crosses into another mount than the one the directory was opened on:
// it is an error to meet one. Trees are those of somebody hostile, of which nobody
// changes anything while they are worked on. Depth is bounded (maxDepth), so that
// no tree exhausts descriptors. Errors are the kernel's, with the operation and the
// path below the place; nothing is undone after one.
package tree
