// Package fullvm is the tier of whole machines: a disk image of any system, booted by a firmware, with a
// screen, a keyboard, a pointer, a serial port and a power switch.
//
// What a machine writes goes to a qcow2 file of its own, over the disk image that all machines of it share and
// none can change. That file is in the sandbox's directory of the disk pool, whose limit is the sandbox's, and so
// are its marks. The directory of a sandbox in the pool:
//
//	disk.qcow2         what it wrote
//	mark-NAME/         a mark: state and manifest.json as docs/formats/vmtemplate.md has snapshots, and
//	                   disk.qcow2, the disk of that moment, which is there last
//	mark-NAME.old/ .tmp-*  of a call that did not come to its end
//
// The state of a sandbox, what was asked for and how far that is, is DIR/ID/state.json. It is written before anything
// else is made, and goes last.
//
// The machine is a virtual machine with a name ("f." and the id), so that it goes on when this process
// ends, and is adopted by the next.
//
// If the image has the guest agent as a service, commands and files work as in other tiers, but run among all
// other programs of the machine and as its root may: the machine is the sandbox. Without it they are
// Unsupported, and screen, console, power and marks work all the same. The host opens no file system of a guest.
package fullvm
