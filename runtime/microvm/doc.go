// Package microvm is the tier that gives each sandbox a kernel of its own, in a virtual
// machine that goes on where a template stopped.
//
// # Who owns what
//
// A virtual machine monitor (package vmm) runs the machines, whose processes outlive this
// one. The agent inside (package guest) runs commands and serves files. What a sandbox is
// made of has names derived from its id:
//
//	<Dir>/<id>/state       record of what was asked for; written first, removed last (docs/formats/microvm-state.md)
//	<Dir>/<id>/exit        how it ended by itself, until that is acknowledged
//	<Dir>/<id>/memory      its machine, while it is suspended
//	<Dir>/moments/<name>   a machine that copies go on from, with the disk vm.moment.<name> of the pool
//	disk pool vm.<id>      a directory with one file, the machine's disk
//	control group vm.<id>  of the monitor: what a machine may use of this one; vm.<id>.disk of the one that serves files
//	machine <id>           of the monitor; <id>.disk the one that serves files of a stopped sandbox
//	hold vm-net/<id>       its network namespace, in which the tap is
//
// Layers are mapped into the machine: all machines share one copy of them in the page
// cache of this one. Their files are made longer by a hole, to the size of the slot they are
// put in, and readable by everybody who can reach them, which are only those who are
// handed a descriptor.
//
// # The machine is the wall
//
// What the guest says of commands, files and its own memory is believed only as far
// as it can be wrong without harm: see package guest. That a sandbox ended, what its machine
// uses of this one, and what it may reach are seen from outside.
//
// # What it has not
//
// It is no runtime.Phaser and no runtime.Packer. Profiles whose abilities no guest gives are
// Unsupported. Host directories cannot be shown.
package microvm
